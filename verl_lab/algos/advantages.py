"""Advantages without a critic: what a sample's reward is worth beside the others of its prompt.

Shapes: B samples. Groups go by id, never by position.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from verl_lab.algos.arguments import require_choice, require_flat
from verl_lab.errors import RewardError

Baseline = Literal["group_mean", "leave_one_out", "none"]
Scale = Literal["group_std", "batch_std", "none"]
EPSILON = 1e-6


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "group_std",
) -> Tensor:
    """Rewards less a baseline, over a scale.

    - GRPO (Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2): `group_mean`, `group_std`:
      A_i = (r_i - mean) / (std + 1e-6), std unbiased
    - Dr.GRPO (Liu et al. 2025, arXiv:2503.20783): `group_mean`, `none`
    - RLOO (Ahmadian et al. 2024, arXiv:2402.14740): `leave_one_out`, `none`:
      A_i = r_i - mean of the others = n/(n-1) (r_i - mean)

    A group whose rewards are all equal gets exactly 0 with either group baseline, and so does a
    group of one. Without a baseline, equal rewards are not divided: their deviation is 0.

    Args:
        rewards: [B] floating.
        group_ids: [B] int64.
        baseline: what is subtracted.
        scale: what the difference is divided by; `batch_std` is the deviation of all rewards.

    Returns:
        [B] in the order and dtype of `rewards`.

    Raises:
        RewardError: a reward is nan or infinite.
    """
    require_choice("baseline", baseline, get_args(Baseline))
    require_choice("scale", scale, get_args(Scale))
    _check(rewards, group_ids)
    group, size = _groups(group_ids)
    constant = _is_constant(rewards, group, size)[group]
    mean = _sum(rewards, group, size) / size
    centred = rewards - mean[group] if baseline != "none" else rewards.clone()
    if baseline == "leave_one_out":
        count = size.to(rewards.dtype)
        centred = centred * (count / (count - 1).clamp(min=1))[group]
    if scale == "group_std":
        squares = _sum((rewards - mean[group]).square(), group, size)
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        centred = centred / (std[group] + EPSILON).masked_fill(constant, 1.0)
    elif scale == "batch_std" and (rewards != rewards[:1]).any():
        centred = centred / (rewards.std() + EPSILON)
    if baseline == "none":
        return centred
    # Rounding makes the mean of equal numbers differ from them: 3 rewards of 1000.1 gave 0.98.
    return centred.masked_fill(constant, 0.0)


def constant_groups(rewards: Tensor, group_ids: Tensor) -> int:
    """The number of groups whose rewards are all equal: they teach nothing.

    Args:
        rewards: [B].
        group_ids: [B] int64.
    """
    _check(rewards, group_ids)
    return int(_is_constant(rewards, *_groups(group_ids)).sum())


def _check(rewards: Tensor, group_ids: Tensor) -> None:
    require_flat(rewards=rewards, group_ids=group_ids)
    wrong = (~rewards.isfinite()).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise RewardError(
            f"rewards: {len(wrong)} of {len(rewards)} are not finite, the first {rewards[row]} at "
            f"row {row} of group {int(group_ids[row])}; score these samples or leave them out"
        )


def _groups(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The group of each sample, counted from 0, and the size of each group."""
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return group, size


def _sum(values: Tensor, group: Tensor, size: Tensor) -> Tensor:
    return values.new_zeros(len(size)).index_add_(0, group, values)


def _is_constant(rewards: Tensor, group: Tensor, size: Tensor) -> Tensor:
    low = rewards.new_full((len(size),), torch.inf).scatter_reduce_(0, group, rewards, "amin")
    high = rewards.new_full((len(size),), -torch.inf).scatter_reduce_(0, group, rewards, "amax")
    return low == high
