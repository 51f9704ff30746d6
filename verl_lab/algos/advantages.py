"""Advantages without a critic: what a sample's reward is worth beside the others of its prompt.

Shapes: B samples. Groups go by id, never by position.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from verl_lab.errors import ShapeError

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
    group of one.

    Args:
        rewards: [B].
        group_ids: [B] int64.
        baseline: what is subtracted.
        scale: what the difference is divided by; `batch_std` is the deviation of all rewards.

    Returns:
        [B] in the order and dtype of `rewards`.
    """
    _check(rewards, group_ids)
    group, size = _groups(group_ids)
    mean = _sum(rewards, group, size) / size
    centred = rewards - mean[group] if baseline != "none" else rewards.clone()
    if baseline == "leave_one_out":
        others = (size - 1).clamp(min=1)
        centred = centred * (size / others)[group]
    if scale == "group_std":
        squares = _sum((rewards - mean[group]).square(), group, size)
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        centred = centred / (std[group] + EPSILON)
    elif scale == "batch_std" and len(rewards) > 1:
        centred = centred / (rewards.std() + EPSILON)
    if baseline == "none":
        return centred
    # Rounding makes the mean of equal numbers differ from them: 3 rewards of 1000.1 gave 0.98.
    return centred.masked_fill(_is_constant(rewards, group, size)[group], 0.0)


def constant_groups(rewards: Tensor, group_ids: Tensor) -> int:
    """The number of groups whose rewards are all equal: they teach nothing.

    Args:
        rewards: [B].
        group_ids: [B] int64.
    """
    _check(rewards, group_ids)
    return int(_is_constant(rewards, *_groups(group_ids)).sum())


def _check(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ShapeError(
            f"rewards and group_ids must be [B], got {tuple(rewards.shape)} and "
            f"{tuple(group_ids.shape)}"
        )


def _groups(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The group of each sample, counted from 0, and the size of each group."""
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return group, size


def _sum(values: Tensor, group: Tensor, size: Tensor) -> Tensor:
    return torch.zeros(len(size), dtype=values.dtype).index_add_(0, group, values)


def _is_constant(rewards: Tensor, group: Tensor, size: Tensor) -> Tensor:
    low = rewards.new_full((len(size),), torch.inf).scatter_reduce_(0, group, rewards, "amin")
    high = rewards.new_full((len(size),), -torch.inf).scatter_reduce_(0, group, rewards, "amax")
    return low == high
