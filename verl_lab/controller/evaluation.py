"""Evaluation of what is trained, on data that it never trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verl_lab.batch.columns import Batch
from verl_lab.data.examples import as_prompts
from verl_lab.engines.trainer.base import UpdateSettings

if TYPE_CHECKING:
    from verl_lab.controller.lab import Lab

GREEDY_SEED_STEP = 0
"""Evaluations sample with the key of step 0; training steps count from 1."""


async def evaluate(lab: Lab, heldout: Batch) -> dict[str, float]:
    """Metrics of the objective where the data has responses, and of the policy's own responses
    where something scores them."""
    config = lab.config
    found: dict[str, float] = {}
    if not config.samples_policy:
        rows = heldout.slice(0, config.eval.num_prompts * config.samples_per_prompt)
        settings = UpdateSettings.from_config(config, step=lab.step).to_dict()
        found = _named(await lab.train("evaluate", rows, settings))
        heldout = as_prompts(heldout)
    if config.has_rollout and lab.parts:
        async with lab.rollout_lock:
            await lab.catch_up()
            found |= await _judge(lab, heldout.slice(0, config.eval.num_prompts))
    return found


async def _judge(lab: Lab, prompts: Batch) -> dict[str, float]:
    """Metrics of the policy's responses to held-out prompts, one each."""
    sampling = {
        **lab.sampling(),
        "group_size": 1,
        "temperature": lab.config.eval.temperature,
        "top_p": 1.0,
        "top_k": 0,
    }
    batch = await lab.generate(prompts, sampling, step=GREEDY_SEED_STEP)
    batch, _ = await lab.score_parts(batch)
    metrics = {"eval/reward": float(batch.numpy("reward").mean())}
    for part in lab.parts if len(lab.parts) > 1 else ():
        metrics[f"eval/reward/{part}"] = float(batch.numpy(f"reward/{part}").mean())
    if "task" in lab.parts:
        metrics["eval/accuracy"] = float((batch.numpy("reward/task") >= 1).mean())
    lengths = [len(ids) for ids in batch.lists("response_ids")]
    return {**metrics, "eval/response_tokens": float(np.mean(lengths))}


def _named(metrics: dict[str, float]) -> dict[str, float]:
    """The objective's metrics as those of an evaluation."""
    kept = {
        "loss/sft": "eval/loss",
        "loss/preference": "eval/loss",
        "loss/reward_model": "eval/loss",
        "preference/accuracy": "eval/pair_accuracy",
        "preference/margin": "eval/margin",
    }
    found = {name: metrics[key] for key, name in kept.items() if key in metrics}
    if "policy/nll" in metrics:
        found["eval/perplexity"] = float(np.exp(min(metrics["policy/nll"], 50.0)))
    return found
