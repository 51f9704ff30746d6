"""What is measured beside the training: how far policies are from each other."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_lab.algos.correction import correction_metrics, correction_weights
from verl_lab.algos.mismatch import mismatch
from verl_lab.batch.columns import Batch
from verl_lab.batch.pack import pack
from verl_lab.engines.trainer.base import UpdateSettings
from verl_lab.engines.trainer.objectives import MASKS, token_mask


def mismatch_metrics(batch: Batch, settings: UpdateSettings) -> dict[str, float]:
    """How far rollout and trainer disagree, and what the correction made of it."""
    masks = [name for name in MASKS if name in batch]
    packed = pack(batch, "cpu", ["old_logprobs", "rollout_logprobs", *masks])
    old, rollout = packed.tokens["old_logprobs"], packed.tokens["rollout_logprobs"]
    mask = token_mask(packed)
    found: dict[str, Tensor] = dict(mismatch(old, rollout, mask))
    if settings.correction != "none":
        low, high = settings.correction_bounds
        weights = correction_weights(
            old,
            rollout,
            mask,
            packed.sample_index,
            mode=settings.correction,  # type: ignore[arg-type]
            low=low,
            high=high,
        )
        found |= correction_metrics(
            weights, old, rollout, mask, packed.sample_index, low=low, high=high
        )
    return {f"policy/{name}": float(value) for name, value in found.items()}


def with_other_responses(batch: Batch) -> Batch:
    """Each prompt with the response to the next one."""
    order = [*range(1, len(batch)), 0]
    columns = {"response_ids": batch.take(order).lists("response_ids")}
    return batch.select(["group_id", "prompt_ids"]).with_columns(columns)


def mean_divergence(batch: Batch) -> Tensor:
    """The mean over samples of the log-ratio of policy and reference, summed over tokens; never
    negative."""
    pairs = zip(batch.lists("old_logprobs"), batch.lists("ref_logprobs"), strict=True)
    sums = [float((mine - theirs).sum()) for mine, theirs in pairs]
    return torch.tensor(sum(sums) / len(sums)).clamp(min=0)
