"""From rewards to returns and advantages token by token.

Shapes: B samples, T response tokens, one sample after the other and in order. `sample_index` [T]
int64 is the row of each token and `mask` [T] bool True where the policy sampled it. What other
tokens hold (observations, tool output; inf and nan too) changes nothing: the recursions carry what
comes after such a token past it, undiscounted, and its own result is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_lab.algos.arguments import require_flat
from verl_lab.errors import ShapeError

WHITEN_EPSILON = 1e-8


def place_rewards(rewards: Tensor, sample_index: Tensor, mask: Tensor) -> Tensor:
    """Each sample's reward on its last token that the policy sampled, 0 on all others.

    Args:
        rewards: [B].
        sample_index: [T].
        mask: [T].

    Returns:
        [T]; the reward of a sample without such a token is in no place.

    Raises:
        ShapeError: also where tokens are out of order or belong to samples that are not here.
    """
    _require_rows(sample_index, mask=mask)
    _require_samples("rewards", rewards, sample_index)
    placed = rewards.new_zeros(len(mask))
    places, rows = mask.nonzero()[:, 0], sample_index[mask]
    is_last = torch.ones_like(rows, dtype=torch.bool)
    is_last[:-1] = rows[1:] != rows[:-1]
    placed[places[is_last]] = rewards[rows[is_last]]
    return placed


def discounted_returns(
    token_rewards: Tensor, sample_index: Tensor, mask: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """R_t = rho_t + gamma R_{t+1} within each sample (REINFORCE++: arXiv:2501.03262).

    Args:
        token_rewards: [T] rho.
        sample_index: [T].
        mask: [T].
        gamma: discount a token that the policy sampled.

    Returns:
        [T], 0 where masked.
    """
    _require_rows(sample_index, token_rewards=token_rewards, mask=mask)
    grid = _Grid(sample_index, mask)
    rewards = grid.of(token_rewards)
    found = torch.zeros_like(rewards)
    after = rewards.new_zeros(grid.num_rows)
    for t in reversed(range(grid.width)):
        after = rewards[:, t] + gamma * after
        found[:, t] = after
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
        token_rewards: [T] rho.
        values: [T] V, of the state before each token.
        sample_index: [T].
        mask: [T].
        gamma: discount a token that the policy sampled.
        lam: how far an advantage looks ahead: 0 one step, 1 to the end.
        last_values: [B] the value after each sample's last token, for samples that were cut
            there; 0 by default, a true end.

    Returns:
        Advantages [T], and the returns A + V [T], before any whitening; both 0 where masked.
    """
    _require_rows(sample_index, token_rewards=token_rewards, values=values, mask=mask)
    grid = _Grid(sample_index, mask)
    rewards, known = grid.of(token_rewards), grid.of(values)
    found = torch.zeros_like(rewards)
    advantage = rewards.new_zeros(grid.num_rows)
    next_value = torch.zeros_like(advantage)
    if last_values is not None:
        _require_samples("last_values", last_values, sample_index)
        next_value = last_values.to(rewards.dtype)[grid.rows]
    for t in reversed(range(grid.width)):
        delta = rewards[:, t] + gamma * next_value - known[:, t]
        advantage = delta + gamma * lam * advantage
        next_value = known[:, t]
        found[:, t] = advantage
    advantages = grid.back(found)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Values of mean 0 and deviation 1 over the unmasked tokens.

        (x - mean) / sqrt(var + 1e-8), var unbiased

    Args:
        values: [T].
        mask: [T].
        shift_mean: False adds the mean again, as rewards are whitened.

    Returns:
        [T], 0 where masked. Equal values, or a single one, have no deviation to divide by: their
        difference to the mean is exactly 0.
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


def _require_rows(sample_index: Tensor, **of_tokens: Tensor) -> None:
    require_flat(sample_index=sample_index, **of_tokens)
    falls = (sample_index[1:] < sample_index[:-1]).nonzero()
    if len(falls):
        place = int(falls[0])
        before, after = sample_index[place : place + 2].tolist()
        raise ShapeError(
            f"sample_index: must not fall, but goes from {before} to {after} after token {place}; "
            f"put the tokens of each sample next to each other, the samples in order"
        )


def _require_samples(name: str, of_samples: Tensor, sample_index: Tensor) -> None:
    num_samples = int(sample_index[-1]) + 1 if len(sample_index) else 0
    if of_samples.ndim != 1 or len(of_samples) < num_samples:
        raise ShapeError(
            f"{name}: must be one-dimensional with a value for each of {num_samples} samples, got "
            f"{tuple(of_samples.shape)}; number the samples in sample_index as they are there"
        )


class _Grid:
    """The unmasked tokens of all samples as a block, right-aligned: a column is a time before the
    end. So a recursion is a loop over the longest sample, masked tokens are simply not there, and
    what it makes of the padding on the left comes after all that is read.
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
