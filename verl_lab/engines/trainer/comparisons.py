"""Objectives over whole samples: preferences of a policy, and reward models.

Like those of `objectives`, they are sums over micro-batches, which keep the two samples of a pair
together. Shapes: B samples of the micro-batch, P pairs, T response tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_lab.algos.arguments import call_options
from verl_lab.algos.preference import (
    kto_loss,
    pair_accuracy,
    preference_loss,
    reward_model_loss,
    sample_means,
    sample_sums,
)
from verl_lab.batch.columns import Batch
from verl_lab.batch.pack import Packed
from verl_lab.engines.trainer.base import UpdateSettings
from verl_lab.engines.trainer.objectives import MASKS, Part, pair_rows, token_mask
from verl_lab.engines.trainer.policy import PackedPolicy, PackedScorer

KEY = "preference.options"


class PairObjective:
    """DPO and its family (Rafailov et al. 2023, arXiv:2305.18290).

    A sample counts by the sum of its log-probabilities; with `ipo` by their mean, as its authors
    confirmed.

    Args:
        policy: what is trained.
        batch: the rows of one update: two samples a group, `is_chosen`, `ref_logprobs`.
        settings: the numbers.
    """

    def __init__(self, policy: PackedPolicy, batch: Batch, settings: UpdateSettings) -> None:
        self.columns = [*(name for name in MASKS if name in batch), "ref_logprobs"]
        self._policy, self._settings = policy, settings
        self._num_pairs = len(batch.groups())
        self._options = call_options(preference_loss, settings.preference_options, {}, KEY)

    def __call__(self, packed: Packed, rows: Batch) -> Part:
        """See `objectives.Objective`."""
        settings = self._settings
        logprobs, _ = self._policy.logprobs(packed, 1.0, with_entropy=False)
        of_sample = sample_means if settings.preference_loss == "ipo" else sample_sums
        mine, theirs = _of_samples(of_sample, packed, len(rows), logprobs)
        chosen, rejected = _places(rows, logprobs)
        losses = preference_loss(
            mine[chosen],
            mine[rejected],
            theirs[chosen],
            theirs[rejected],
            kind=settings.preference_loss,  # type: ignore[arg-type]
            beta=settings.beta,
            **self._options,
        )
        gain = settings.beta * (mine - theirs).detach()
        loss = losses.sum() / self._num_pairs
        share = len(chosen) / self._num_pairs
        metrics = {
            "loss/preference": loss.detach(),
            "preference/accuracy": share * pair_accuracy(gain[chosen], gain[rejected]),
            "preference/margin": (gain[chosen] - gain[rejected]).sum() / self._num_pairs,
            "preference/chosen": gain[chosen].sum() / self._num_pairs,
            "preference/rejected": gain[rejected].sum() / self._num_pairs,
            "policy/chosen_logprobs": mine.detach()[chosen].sum() / self._num_pairs,
            "policy/rejected_logprobs": mine.detach()[rejected].sum() / self._num_pairs,
        }
        return Part(loss, metrics)


class KtoObjective:
    """KTO (Ethayarajh et al. 2024, arXiv:2402.01306): single samples that are good or bad.

    Args:
        policy: what is trained.
        batch: the rows of one update, with `is_chosen` and `ref_logprobs`.
        settings: the numbers.
        divergence: the KL to the reference on responses to other prompts, [].
    """

    def __init__(
        self, policy: PackedPolicy, batch: Batch, settings: UpdateSettings, divergence: Tensor
    ) -> None:
        self.columns = [*(name for name in MASKS if name in batch), "ref_logprobs"]
        self._policy, self._settings, self._divergence = policy, settings, divergence
        self._num_samples = len(batch)
        self._num_chosen = max(sum(batch["is_chosen"]), 1)
        self._options = call_options(kto_loss, settings.preference_options, {}, KEY)

    def __call__(self, packed: Packed, rows: Batch) -> Part:
        """See `objectives.Objective`."""
        logprobs, _ = self._policy.logprobs(packed, 1.0, with_entropy=False)
        mine, theirs = _of_samples(sample_sums, packed, len(rows), logprobs)
        is_chosen = torch.tensor(rows["is_chosen"], device=mine.device)
        losses = kto_loss(
            mine,
            theirs,
            is_chosen,
            self._divergence.to(mine),
            beta=self._settings.beta,
            **self._options,
        )
        gain = self._settings.beta * (mine - theirs).detach()
        loss = losses.sum() / self._num_samples
        num_rejected = max(self._num_samples - self._num_chosen, 1)
        right = (gain > self._settings.beta * self._divergence.to(gain)) == is_chosen
        metrics = {
            "loss/preference": loss.detach(),
            "preference/accuracy": right.sum() / self._num_samples,
            "preference/chosen": gain[is_chosen].sum() / self._num_chosen,
            "preference/rejected": gain[~is_chosen].sum() / num_rejected,
        }
        return Part(loss, metrics)


class RewardModelObjective:
    """Scores that rank the chosen sample above the rejected one (Bradley & Terry 1952).

    Args:
        scorer: what is trained.
        batch: the rows of one update: two samples a group, `is_chosen`, perhaps `margin`.
        settings: the numbers.
    """

    def __init__(self, scorer: PackedScorer, batch: Batch, settings: UpdateSettings) -> None:
        self.columns: list[str] = []
        self._scorer = scorer
        self._num_pairs = len(batch.groups())
        self._options = call_options(reward_model_loss, settings.preference_options, {}, KEY)

    def __call__(self, packed: Packed, rows: Batch) -> Part:
        """See `objectives.Objective`."""
        scores = self._scorer.scores(packed)
        chosen, rejected = _places(rows, scores)
        margin = None
        if "margin" in rows:
            margin = torch.tensor(rows["margin"], dtype=scores.dtype, device=scores.device)[chosen]
        losses = reward_model_loss(scores[chosen], scores[rejected], margin, **self._options)
        loss = losses.sum() / self._num_pairs
        found = scores.detach()
        share = len(chosen) / self._num_pairs
        metrics = {
            "loss/reward_model": loss.detach(),
            "preference/accuracy": share * pair_accuracy(found[chosen], found[rejected]),
            "preference/margin": (found[chosen] - found[rejected]).sum() / self._num_pairs,
            "preference/chosen": found[chosen].sum() / self._num_pairs,
            "preference/rejected": found[rejected].sum() / self._num_pairs,
        }
        return Part(loss, metrics)


def _of_samples(
    of_sample: Any, packed: Packed, num_samples: int, logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """The policy's and the reference's number of each sample, [B] each."""
    mask = token_mask(packed)
    reference = packed.tokens["ref_logprobs"].to(logprobs.dtype)
    return (
        of_sample(logprobs, mask, packed.sample_index, num_samples),
        of_sample(reference, mask, packed.sample_index, num_samples),
    )


def _places(rows: Batch, like: Tensor) -> tuple[Tensor, Tensor]:
    chosen, rejected = pair_rows(rows)
    return torch.from_numpy(chosen).to(like.device), torch.from_numpy(rejected).to(like.device)
