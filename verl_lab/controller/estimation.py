"""From a scored batch to advantages: the pure part of a step, in the controller's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_lab.algos.advantages import constant_rows
from verl_lab.algos.arguments import call_options
from verl_lab.algos.estimators import ESTIMATORS, Samples, estimate
from verl_lab.algos.kl import kl
from verl_lab.algos.losses import POLICY_LOSSES
from verl_lab.batch.columns import Batch
from verl_lab.config.functions import lookup
from verl_lab.config.schema import LabConfig
from verl_lab.errors import ShapeError

SHAPING = {"length", "overlong"}
"""Parts of a reward that say nothing of whether a response is right."""


@dataclass(frozen=True)
class Estimated:
    """A batch with advantages, and what is worth recording of them."""

    batch: Batch
    metrics: dict[str, float]


def with_advantages(
    batch: Batch, config: LabConfig, parts: Mapping[str, float], kl_coef: float
) -> Estimated:
    """Adds `advantages`, `returns` where the estimator has them, and `loss_mask` where truncated
    responses are left out.

    Args:
        batch: with `reward`, `group_id` and what the estimator needs.
        config: names the estimator.
        parts: weight per reward part.
        kl_coef: of the KL term; it is taken from the rewards if the config says so.
    """
    algorithm = config.algorithm
    columns: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    samples, divergence = _samples(batch, config, parts, kl_coef)
    if divergence is not None:
        metrics["policy/kl_ref"] = float(divergence[samples.mask].mean())
    name = algorithm.advantage
    estimator = ESTIMATORS[name] if name in ESTIMATORS else lookup("advantage", name)
    found = estimate(
        estimator,
        samples,
        algorithm.advantage_options,
        baseline=algorithm.baseline,
        scale=algorithm.scale,
    )
    columns["advantages"] = _rows(found.advantages, samples)
    if found.returns is not None:
        columns["returns"] = _rows(found.returns, samples)
    if algorithm.mask_truncated:
        keep = (~samples.is_truncated)[samples.sample_index]
        mask = keep if "loss_mask" not in batch else keep & _flat(batch, "loss_mask").bool()
        columns["loss_mask"] = _rows(mask, samples)
        metrics["rollout/masked_fraction"] = float(samples.is_truncated.double().mean())
    return Estimated(batch.with_columns(columns), metrics)


def checked(config: LabConfig) -> LabConfig:
    """The settings, if the estimator and the loss have the options that these name.

    Raises:
        ConfigError: one has no such option; says which there are.
    """
    algorithm = config.algorithm
    if config.objective != "policy":
        return config
    estimator, loss = algorithm.advantage, algorithm.policy_loss
    call_options(
        ESTIMATORS[estimator] if estimator in ESTIMATORS else lookup("advantage", estimator),
        algorithm.advantage_options,
        {},
        "algorithm.advantage_options",
    )
    call_options(
        POLICY_LOSSES[loss] if loss in POLICY_LOSSES else lookup("policy_loss", loss),
        algorithm.loss_options,
        {},
        "algorithm.loss_options",
    )
    return config


def constant_samples(batch: Batch, parts: Mapping[str, float]) -> np.ndarray[Any, Any]:
    """[B] True on the samples of groups whose rewards are all equal, before shaping by length."""
    rewards = batch.numpy("reward").copy()
    for part in SHAPING & parts.keys():
        rewards -= parts[part] * batch.numpy(f"reward/{part}")
    groups = torch.from_numpy(batch.numpy("group_id").copy())
    # Rounded: taking a part off again need not give back equal numbers to the last bit.
    values = torch.from_numpy(np.round(rewards, 9) if SHAPING & parts.keys() else rewards)
    return constant_rows(values, groups).numpy()


def best_and_worst(batch: Batch) -> Batch:
    """The best and the worst sample of each group whose rewards differ, with `is_chosen`.

    Of equally good ones the first counts.
    """
    rewards = batch.numpy("reward")
    rows: list[int] = []
    for group in batch.groups().values():
        best = max(group, key=lambda row: rewards[row])
        worst = min(group, key=lambda row: rewards[row])
        if rewards[best] > rewards[worst]:
            rows += [best, worst]
    return batch.take(rows).with_columns({"is_chosen": [True, False] * (len(rows) // 2)})


def _samples(
    batch: Batch, config: LabConfig, parts: Mapping[str, float], kl_coef: float
) -> tuple[Samples, Tensor | None]:
    lengths = torch.tensor([len(ids) for ids in batch.lists("response_ids")])
    sample_index = torch.repeat_interleave(torch.arange(len(batch)), lengths)
    mask = torch.ones(len(sample_index), dtype=torch.bool)
    if "response_mask" in batch:
        mask = _flat(batch, "response_mask").bool()
    rewards = torch.from_numpy(batch.numpy("reward").copy())
    divergence, penalty = None, torch.zeros(len(mask), dtype=rewards.dtype)
    if config.algorithm.kl_in == "reward" and kl_coef > 0:
        divergence = _divergence(batch, config, mask)
        penalty = kl_coef * divergence
    known = [part for part in parts if f"reward/{part}" in batch]
    zero = torch.zeros(len(batch), dtype=rewards.dtype)
    columns = [torch.from_numpy(batch.numpy(f"reward/{part}").copy()) for part in known]
    return Samples(
        rewards=rewards,
        group_ids=torch.from_numpy(batch.numpy("group_id").copy()),
        lengths=lengths,
        mask=mask,
        sample_index=sample_index,
        kl_penalty=penalty,
        parts=torch.stack(columns) if columns else zero[None][:0],
        part_weights=torch.tensor([parts[part] for part in known], dtype=rewards.dtype),
        is_truncated=torch.tensor([reason == "length" for reason in _reasons(batch)]),
        values=_flat(batch, "values") if "values" in batch else None,
        greedy_rewards=torch.from_numpy(batch.numpy("greedy_reward").copy())
        if "greedy_reward" in batch
        else None,
    ), divergence


def _divergence(batch: Batch, config: LabConfig, mask: Tensor) -> Tensor:
    if "ref_logprobs" not in batch:
        raise ShapeError(
            "advantages: algorithm.kl_in=reward needs `ref_logprobs`; run the stage "
            "reference_logprobs first"
        )
    own = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
    mine, theirs = _flat(batch, own).double(), _flat(batch, "ref_logprobs").double()
    return kl(
        torch.where(mask, mine, 0.0), torch.where(mask, theirs, 0.0), config.algorithm.kl_estimator
    )


def _reasons(batch: Batch) -> list[str]:
    return batch["finish_reason"] if "finish_reason" in batch else [""] * len(batch)


def _flat(batch: Batch, name: str) -> Tensor:
    return torch.from_numpy(np.concatenate(batch.lists(name)))


def _rows(values: Tensor, samples: Samples) -> list[np.ndarray[Any, Any]]:
    return np.split(values.numpy(), np.cumsum(samples.lengths.numpy())[:-1])
