"""From rewards to returns and advantages token by token.

Shapes: B samples, T response tokens, one sample after the other and in order. `sample_index` [T]
int64 is the row of each token and `mask` [T] bool True where the policy sampled it. What other
tokens hold (observations, tool output; inf and nan too) changes nothing: the recursions carry what
comes after such a token past it, and its own result is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_lab.algos.arguments import require_flat

WHITEN_EPSILON = 1e-8


def place_rewards(rewards: Tensor, sample_index: Tensor, mask: Tensor) -> Tensor:
    """Each sample's reward on its last token that the policy sampled, 0 on all others.

    Args:
        rewards: [B].
        sample_index: [T].
        mask: [T].

    Returns:
        [T]; the reward of a sample without such a token is in no place.
    """
    require_flat(sample_index=sample_index, mask=mask)
    placed = rewards.new_zeros(len(mask))
    places, rows = mask.nonzero()[:, 0], sample_index[mask]
    is_last = torch.ones_like(rows, dtype=torch.bool)
    is_last[:-1] = rows[1:] != rows[:-1]
    placed[places[is_last]] = rewards[rows[is_last]]
    return placed


def discounted_returns(
    token_rewards: Tensor, sample_index: Tensor, mask: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """R_t = rho_t + gamma R_{t+1} within each sample.

    Args:
        token_rewards: [T].
        sample_index: [T].
        mask: [T].
        gamma: discount a token that the policy sampled.

    Returns:
        [T].
    """
    require_flat(token_rewards=token_rewards, sample_index=sample_index, mask=mask)
    grid = _Grid(sample_index, mask)
    rewards = grid.of(token_rewards)
    found = torch.zeros_like(rewards)
    after = rewards.new_zeros(grid.num_rows)
    for t in reversed(range(grid.width)):
        after = rewards[:, t] + gamma * after
        found[:, t] = after
        after = torch.where(grid.is_token[:, t], after, 0.0)
    return grid.back(found)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    sample_index: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

        delta_t = rho_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}

    Args:
        token_rewards: [T].
        values: [T], of the state before each token.
        sample_index: [T].
        mask: [T].
        gamma: discount a token.
        lam: how far an advantage looks ahead: 0 one step, 1 to the end.
        last_values: [B] the value after each sample's last token, for samples that were cut
            there; 0 by default, a true end.

    Returns:
        Advantages [T], and the returns A + V [T], before any whitening.
    """
    require_flat(token_rewards=token_rewards, values=values, sample_index=sample_index, mask=mask)
    grid = _Grid(sample_index, mask)
    rewards, known = grid.of(token_rewards), grid.of(values)
    found = torch.zeros_like(rewards)
    advantage = rewards.new_zeros(grid.num_rows)
    next_value = torch.zeros_like(advantage)
    if last_values is not None:
        next_value = last_values.to(rewards.dtype)[grid.rows].clone()
    for t in reversed(range(grid.width)):
        delta = rewards[:, t] + gamma * next_value - known[:, t]
        is_token = grid.is_token[:, t]
        advantage = torch.where(is_token, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(is_token, known[:, t], next_value)
        found[:, t] = advantage
    advantages = grid.back(found)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the unmasked tokens, with the unbiased variance.

    Args:
        values: [T].
        mask: [T].
        shift_mean: False adds the mean again, as rewards are whitened.

    Returns:
        [T], 0 where masked. All equal, or a single one, has no deviation to divide by: the
        difference to the mean, 0, stays.
    """
    require_flat(values=values, mask=mask)
    kept = values[mask]
    if not len(kept):
        return torch.zeros_like(values)
    mean = kept.mean()
    centred = kept - mean
    if len(kept) > 1 and bool((kept != kept[0]).any()):
        centred = centred * (centred.square().sum() / (len(kept) - 1) + WHITEN_EPSILON).rsqrt()
    else:
        centred = torch.zeros_like(centred)
    found = torch.zeros_like(values)
    found[mask] = centred if shift_mean else centred + mean
    return found


class _Grid:
    """The unmasked tokens of all samples as a block, right-aligned: a column is a time before the
    end. So a recursion is a loop over the longest sample, and masked tokens are simply not there.
    """

    def __init__(self, sample_index: Tensor, mask: Tensor) -> None:
        self._mask = mask
        self.rows, row, count = torch.unique_consecutive(
            sample_index[mask], return_inverse=True, return_counts=True
        )
        self.num_rows, self.width = len(count), int(count.max()) if len(count) else 0
        first = count.cumsum(0) - count
        place = torch.arange(len(row), device=row.device) - first[row]
        self._row, self._column = row, self.width - count[row] + place
        self.is_token = torch.zeros(self.num_rows, self.width, dtype=torch.bool, device=mask.device)
        self.is_token[self._row, self._column] = True

    def of(self, values: Tensor) -> Tensor:
        """[num_rows, width], 0 where there is no token."""
        block = values.new_zeros(self.num_rows, self.width)
        block[self._row, self._column] = values[self._mask]
        return block

    def back(self, block: Tensor) -> Tensor:
        """[T], 0 where masked."""
        found = block.new_zeros(len(self._mask))
        found[self._mask] = block[self._row, self._column]
        return found
