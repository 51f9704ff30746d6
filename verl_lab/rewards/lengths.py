"""Reward parts that are made of lengths alone, so no worker has to compute them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl_lab.algos.shaping import overlong_penalty

LENGTH_PARTS = ("length", "overlong")


def length_parts(
    part: str, lengths: np.ndarray[Any, Any], *, max_new_tokens: int, overlong_buffer: int
) -> np.ndarray[Any, Any]:
    """The scores of such a part, [B] float64.

    - `length`: response tokens over `max_new_tokens`, from 0 to 1; a negative weight makes it a
      penalty
    - `overlong`: see `algos.shaping.overlong_penalty`, from -1 to 0

    Args:
        part: one of `LENGTH_PARTS`.
        lengths: [B] response tokens.
        max_new_tokens: the longest response allowed.
        overlong_buffer: over how many tokens before it `overlong` falls.
    """
    if part == "length":
        return np.asarray(lengths / max_new_tokens, dtype=np.float64)
    found = overlong_penalty(
        torch.from_numpy(np.asarray(lengths)), max_tokens=max_new_tokens, buffer=overlong_buffer
    )
    return np.asarray(found.numpy())
