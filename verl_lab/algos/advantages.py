"""Advantages without a critic: what a sample's reward is worth beside the others of its prompt.

Shapes: B samples. Groups go by id, never by position.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from verl_lab.algos.arguments import require_choice, require_flat
from verl_lab.errors import ConfigError, RewardError, ShapeError

Baseline = Literal["group_mean", "leave_one_out", "length_weighted", "greedy", "none"]
Scale = Literal["group_std", "batch_std", "whiten", "none"]
OF_GROUP = ("group_mean", "leave_one_out", "length_weighted")
"""Baselines that come from the group itself."""
EPSILON = 1e-6


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "group_std",
    lengths: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
) -> Tensor:
    """Rewards less a baseline, over a scale.

    - GRPO (Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2): `group_mean`, `group_std`:
      A_i = (r_i - mean) / (std + 1e-6), std unbiased
    - Dr.GRPO (Liu et al. 2025, arXiv:2503.20783): `group_mean`, `none`
    - RLOO (Ahmadian et al. 2024, arXiv:2402.14740): `leave_one_out`, `none`:
      A_i = r_i - mean of the others = n/(n-1) (r_i - mean)
    - OPO (Hao et al. 2025, arXiv:2505.23585): `length_weighted`, `none`:
      A_i = r_i - sum_j len_j r_j / sum_j len_j
    - ReMax (Li et al. 2023, arXiv:2310.10505): `greedy`, `none`: A_i = r_i - r(greedy response)

    A group whose rewards are all equal gets exactly 0 with a baseline of its own, and so does a
    group of one. With another, equal rewards are not divided: their deviation is 0.

    Args:
        rewards: [B] floating.
        group_ids: [B] int64.
        baseline: what is subtracted.
        scale: what the difference is divided by; `batch_std` is the deviation of all rewards.
            `whiten` divides nothing here: it goes over tokens, afterwards.
        lengths: [B] response tokens, for `length_weighted`.
        greedy_rewards: [B] of the greedy response to the same prompt, for `greedy`.

    Returns:
        [B] in the order and dtype of `rewards`.

    Raises:
        RewardError: a reward, or a greedy one, is nan or infinite.
        ConfigError: the baseline needs what was not given.
        ShapeError: what it needs has another length than `rewards`.
    """
    require_choice("baseline", baseline, get_args(Baseline))
    require_choice("scale", scale, get_args(Scale))
    _check(rewards, group_ids)
    needed = _needed(baseline, rewards, group_ids, lengths, greedy_rewards)
    group, size = _groups(group_ids)
    constant = _is_constant(rewards, group, size)[group]
    mean = _sum(rewards, group, size) / size
    centred = rewards - _baseline(baseline, rewards, mean, group, size, needed)
    if scale == "group_std":
        squares = _sum((rewards - mean[group]).square(), group, size)
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        centred = centred / (std[group] + EPSILON).masked_fill(constant, 1.0)
    elif scale == "batch_std" and (rewards != rewards[:1]).any():
        centred = centred / (rewards.std() + EPSILON)
    if baseline not in OF_GROUP:
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


def constant_rows(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """[B] bool, True on the samples of groups whose rewards are all equal.

    Args:
        rewards: [B].
        group_ids: [B] int64.
    """
    _check(rewards, group_ids)
    group, size = _groups(group_ids)
    return _is_constant(rewards, group, size)[group]


def pass_at_k_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """What the best sample of a group adds to the second best; 0 for all others.

    A policy gradient of E[max of k] from groups of k samples: a sample's worth is the maximum less
    the maximum without it (Tang et al. 2025, arXiv:2503.19595).

        A_i = r_i - max_{j != i} r_j where i is the best, else 0

    Two best ones add nothing, and a group of one gets 0: it has no second.

    Args:
        rewards: [B].
        group_ids: [B] int64.

    Returns:
        [B] in the order and dtype of `rewards`.
    """
    _check(rewards, group_ids)
    group, size = _groups(group_ids)
    order = torch.argsort(rewards, descending=True, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    first = size.cumsum(0) - size
    found = torch.zeros_like(rewards)
    several = size > 1
    best, second = order[first[several]], order[first[several] + 1]
    found[best] = rewards[best] - rewards[second]
    return found


def gdpo_advantages(parts: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
    """The weighted sum of reward parts, each normalised in its group (GDPO, arXiv:2601.05242).

        A_i = sum_p w_p (r_pi - mean_p) / (std_p + 1e-6)

    The paper whitens the sum over the batch; that is not done here.

    Args:
        parts: [P, B].
        weights: [P].
        group_ids: [B] int64.

    Returns:
        [B]; a part that is constant in a group adds exactly 0 there.
    """
    if parts.ndim != 2 or weights.shape != parts.shape[:1] or group_ids.shape != parts.shape[1:]:
        raise ShapeError(
            f"parts, weights, group_ids: must be [P, B], [P] and [B], got {tuple(parts.shape)}, "
            f"{tuple(weights.shape)} and {tuple(group_ids.shape)}"
        )
    normalised = [
        weight * group_advantages(part, group_ids)
        for part, weight in zip(parts, weights, strict=True)
    ]
    return torch.stack(normalised).sum(0) if normalised else parts.new_zeros(len(group_ids))


def _needed(
    name: Baseline,
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor | None,
    greedy_rewards: Tensor | None,
) -> Tensor:
    """[B] what a baseline takes beside the rewards; the rewards themselves where it takes none."""
    others = {
        "length_weighted": ("lengths", lengths),
        "greedy": ("greedy_rewards", greedy_rewards),
    }
    what, needed = others.get(name, ("rewards", rewards))
    if needed is None:
        raise ConfigError(
            f"algorithm.baseline={name}: needs {what}; pass them, or use another baseline"
        )
    if needed.shape != rewards.shape:
        raise ShapeError(
            f"algorithm.baseline={name}: {what} {tuple(needed.shape)} do not fit rewards "
            f"{tuple(rewards.shape)}; give one a sample"
        )
    _check_finite(what, needed, group_ids)
    return needed.to(rewards.dtype)


def _baseline(
    name: Baseline, rewards: Tensor, mean: Tensor, group: Tensor, size: Tensor, needed: Tensor
) -> Tensor:
    """[B] what is subtracted from each reward."""
    if name == "none":
        return torch.zeros_like(rewards)
    if name == "greedy":
        return needed
    if name == "group_mean":
        return mean[group]
    if name == "leave_one_out":
        count = size.to(rewards.dtype)
        factor = (count / (count - 1).clamp(min=1))[group]
        return rewards - (rewards - mean[group]) * factor
    # A group without any token has no mean to weigh, and nothing that would train by it.
    total = _sum(needed, group, size).clamp(min=1)
    return (_sum(needed * rewards, group, size) / total)[group]


def _check(rewards: Tensor, group_ids: Tensor) -> None:
    require_flat(rewards=rewards, group_ids=group_ids)
    _check_finite("rewards", rewards, group_ids)


def _check_finite(name: str, rewards: Tensor, group_ids: Tensor) -> None:
    wrong = (~rewards.isfinite()).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise RewardError(
            f"{name}: {len(wrong)} of {len(rewards)} are not finite, the first {rewards[row]} at "
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
