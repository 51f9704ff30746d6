"""Penalties for the length of a response."""

from __future__ import annotations

from torch import Tensor

from verl_lab.errors import ConfigError


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    0 up to `max_tokens - buffer`, from there linearly down to -1 at `max_tokens`, -1 beyond.

    Args:
        lengths: [B] response tokens.
        max_tokens: the longest response allowed.
        buffer: over how many tokens before it the penalty grows.

    Returns:
        [B] float64, from -1 to 0.
    """
    if not 1 <= buffer <= max_tokens:
        raise ConfigError(
            f"reward.overlong_buffer: is {buffer}; use 1 to rollout.max_new_tokens={max_tokens}"
        )
    return ((max_tokens - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)
