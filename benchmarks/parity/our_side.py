"""Our side of the comparison: the objectives that our trainer minimises, on the same samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from cases import BETA, CLIP_HIGH, CLIP_LOW, REWARD_WEIGHTS, Case
from setting import MAX_TOKENS, TEMPERATURE, read_samples
from torch import Tensor

from verl_lab.algos import advantages as advantage_module
from verl_lab.algos.advantages import group_advantages
from verl_lab.algos.estimators import ESTIMATORS, Samples, estimate
from verl_lab.algos.kl import kl
from verl_lab.algos.losses import POLICY_LOSSES
from verl_lab.batch.columns import Batch
from verl_lab.batch.pack import pack, unpack
from verl_lab.config.schema import ModelConfig
from verl_lab.engines.trainer.attention import NAME
from verl_lab.engines.trainer.base import UpdateSettings
from verl_lab.engines.trainer.comparisons import (
    KtoObjective,
    PairObjective,
    RewardModelObjective,
)
from verl_lab.engines.trainer.diagnosis import mean_divergence, with_other_responses
from verl_lab.engines.trainer.objectives import PolicyObjective
from verl_lab.engines.trainer.policy import PackedPolicy, PackedScorer
from verl_lab.models.load import load_policy
from verl_lab.models.scorer import load_scorer, scorer_head

CPU = torch.device("cpu")
ALL_TOKENS = 10_000
SETTINGS: dict[str, Any] = {
    "learning_rate": 0.0,
    "total_updates": 1,
    "warmup_updates": 0,
    "lr_schedule": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "micro_batch_tokens": ALL_TOKENS,
    "updates_per_step": 2,  # so that old log-probabilities are looked for
    "temperature": TEMPERATURE,
    "loss_aggregation": "token-mean",
    "clip_low": CLIP_LOW,
    "clip_high": CLIP_HIGH,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "max_new_tokens": MAX_TOKENS,
    "beta": BETA,
}


class OurSide:
    """Losses and gradients by our trainer's objectives.

    Args:
        folder: where `setting.build` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.samples = read_samples(folder)

    def found(self, case: Case) -> dict[str, Any]:
        """`loss`, `gradients` or `advantages` of a case: what there is to compare."""
        return getattr(self, case.kind)(case)  # type: ignore[no-any-return]

    def causal(self, name: str) -> PackedPolicy:
        """A causal language model with packed attention, in float64."""
        config = ModelConfig(name_or_path=str(self.folder / name))
        model = load_policy(config, CPU, torch.float64, attn_implementation=NAME)
        return PackedPolicy(model, torch.float64)

    # --- GRPO

    def policy_batch(self, case: Case) -> Batch:
        """The samples as a policy's trainer gets them."""
        names = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "group_id")
        batch = Batch.from_dict({name: self.samples[name] for name in names})
        found = estimate(
            ESTIMATORS["group"], self._scored(("reward",)), {}, baseline="group_mean", scale="none"
        )
        columns: dict[str, Any] = {
            "advantages": unpack(found.advantages, batch),
            "old_logprobs": self.causal("old").score(batch, TEMPERATURE, ALL_TOKENS),
            "ref_logprobs": self.causal(case.reference).score(batch, TEMPERATURE, ALL_TOKENS),
        }
        if case.masks_truncated:
            columns["loss_mask"] = [
                [not is_truncated] * len(row)
                for is_truncated, row in zip(
                    self.samples["is_truncated"], batch["response_ids"], strict=True
                )
            ]
        return batch.with_columns(columns)

    def policy(self, case: Case) -> dict[str, Any]:
        """A policy loss with its KL term, entropy bonus and correction."""
        settings = UpdateSettings(**{**SETTINGS, **case.ours})
        policy, batch = self.causal("policy"), self.policy_batch(case)
        loss = POLICY_LOSSES[settings.policy_loss]
        return _gradients(policy.model, PolicyObjective(policy, loss, batch, settings), batch, case)

    def rloo(self, case: Case) -> dict[str, Any]:
        """The gradient of RLOO; the loss has another value."""
        names = ("prompt_ids", "response_ids", "group_id")
        batch = Batch.from_dict({name: self.samples[name] for name in names})
        policy = self.causal("policy")
        mine, theirs = (
            torch.tensor(np.concatenate(model.score(batch, TEMPERATURE, ALL_TOKENS)))
            for model in (policy, self.causal(case.reference))
        )
        penalty = case.ours.get("kl_coef", 0.0) * kl(mine, theirs, "k1")
        samples = self._scored(("reward",), kl_penalty=penalty)
        samples = replace(samples, mask=torch.ones_like(samples.mask))
        found = estimate(ESTIMATORS["group"], samples, {}, baseline="leave_one_out", scale="none")
        batch = batch.with_columns(
            {
                "advantages": unpack(found.advantages, batch),
                "old_logprobs": unpack(mine, batch),
            }
        )
        settings = UpdateSettings(**{**SETTINGS, **case.ours, "kl_coef": 0.0})
        objective = PolicyObjective(policy, POLICY_LOSSES["reinforce"], batch, settings)
        return {"gradients": _gradients(policy.model, objective, batch, case)["gradients"]}

    def advantages(self, case: Case) -> dict[str, Any]:
        """Advantages of samples, [B]."""
        numbers = dict(case.ours)
        epsilon = numbers.pop("epsilon", advantage_module.EPSILON)
        whitened_over = numbers.pop("whitened_over", "tokens")
        estimator = ESTIMATORS[numbers.pop("advantage", "group")]
        samples = self._scored(case.columns)
        with mock.patch.object(advantage_module, "EPSILON", epsilon):
            numbers.setdefault("baseline", "none")
            found = estimate(estimator, samples, {}, **numbers).advantages
            found = found[samples.lengths.cumsum(0) - samples.lengths]
            if whitened_over == "samples":
                found = group_advantages(found, torch.zeros_like(samples.group_ids))
        return {"advantages": found.tolist()}

    def _scored(self, columns: tuple[str, ...], kl_penalty: Tensor | None = None) -> Samples:
        """The samples as an estimator gets them.

        Args:
            columns: the parts of the reward.
            kl_penalty: [T], where there is one.
        """
        lengths = torch.tensor([len(row) for row in self.samples["response_ids"]])
        num_samples, num_tokens = len(lengths), int(lengths.sum())
        parts = torch.tensor([self.samples[name] for name in columns], dtype=torch.float64)
        weights = torch.tensor([REWARD_WEIGHTS[name] for name in columns], dtype=torch.float64)
        return Samples(
            rewards=weights @ parts,
            group_ids=torch.tensor(self.samples["group_id"]),
            lengths=lengths,
            mask=torch.tensor([kept for row in self.samples["response_mask"] for kept in row]),
            sample_index=torch.arange(num_samples).repeat_interleave(lengths),
            kl_penalty=torch.zeros(num_tokens) if kl_penalty is None else kl_penalty,
            parts=parts,
            part_weights=weights,
            is_truncated=torch.tensor(self.samples["is_truncated"]),
        )

    # --- comparisons

    def comparison_batch(self) -> Batch:
        """The samples as chosen and rejected ones."""
        samples = self.samples
        return Batch.from_dict(
            {
                "prompt_ids": samples["prompt_ids"],
                "response_ids": samples["ended_ids"],
                "group_id": samples["pair"],
                "is_chosen": samples["is_chosen"],
            }
        )

    def pairs(self, case: Case) -> dict[str, Any]:
        """DPO and its family."""
        policy, batch = self._with_reference(case)
        settings = UpdateSettings(**{**SETTINGS, **case.ours})
        return _gradients(policy.model, PairObjective(policy, batch, settings), batch, case)

    def kto(self, case: Case) -> dict[str, Any]:
        """KTO, with the KL on responses to other prompts."""
        policy, batch = self._with_reference(case)
        settings = UpdateSettings(**{**SETTINGS, **case.ours})
        swapped = with_other_responses(batch)
        swapped = swapped.with_columns(
            {
                "old_logprobs": policy.score(swapped, 1.0, ALL_TOKENS),
                "ref_logprobs": self.causal(case.reference).score(swapped, 1.0, ALL_TOKENS),
            }
        )
        objective = KtoObjective(policy, batch, settings, mean_divergence(swapped))
        return _gradients(policy.model, objective, batch, case)

    def reward_model(self, case: Case) -> dict[str, Any]:
        """A reward model, in float64."""
        config = ModelConfig(name_or_path=str(self.folder / "scorer"))
        model = load_scorer(config, CPU, torch.float64, attn_implementation=NAME)
        scorer = PackedScorer(model, scorer_head(model), torch.float64)
        batch = self.comparison_batch()
        if "margin" in case.columns:
            batch = batch.with_columns({"margin": self.samples["margin"]})
        settings = UpdateSettings(**{**SETTINGS, **case.ours})
        return _gradients(model, RewardModelObjective(scorer, batch, settings), batch, case)

    def _with_reference(self, case: Case) -> tuple[PackedPolicy, Batch]:
        batch = self.comparison_batch()
        found = self.causal(case.reference).score(batch, 1.0, ALL_TOKENS)
        return self.causal("policy"), batch.with_columns({"ref_logprobs": found})


def _gradients(model: Any, objective: Any, batch: Batch, case: Case) -> dict[str, Any]:
    """The loss over micro-batches, and its gradient by parameter."""
    size = len(batch) // case.num_micro_batches
    total = 0.0
    for start in range(0, len(batch), size):
        rows = batch.take(list(range(start, start + size)))
        part = objective(pack(rows, CPU, objective.columns), rows)
        part.loss.backward()
        total += part.loss.item()
    return {"loss": total, "gradients": {n: p.grad for n, p in model.named_parameters()}}
