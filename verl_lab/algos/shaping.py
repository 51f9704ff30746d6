"""Penalties for the length of a response.

Shapes: B samples. To leave truncated responses out of the loss is the other way, and not here: with
both they would pay twice.
"""

from __future__ import annotations

from torch import Tensor

from verl_lab.errors import ConfigError


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13).

        clip((max_tokens - buffer - length) / buffer, -1, 0)

    0 up to `max_tokens - buffer`, from there linearly down to -1 at `max_tokens`, -1 beyond.

    Args:
        lengths: [B] response tokens.
        max_tokens: the longest response allowed.
        buffer: over how many tokens before it the penalty grows, from 1 to `max_tokens`.

    Returns:
        [B] float64, from -1 to 0.

    Raises:
        ConfigError: the buffer is out of these bounds.
    """
    if not 1 <= buffer <= max_tokens:
        raise ConfigError(
            f"reward.overlong_buffer: is {buffer}; use 1 to rollout.max_new_tokens={max_tokens}"
        )
    return ((max_tokens - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)
