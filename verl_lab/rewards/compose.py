"""One reward out of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def combine(
    parts: Mapping[str, np.ndarray[Any, Any]], weights: Mapping[str, float]
) -> np.ndarray[Any, Any]:
    """The weighted sum of scores.

    Args:
        parts: [B] scores a part.
        weights: a weight a part.

    Returns:
        [B] float64.
    """
    weighted = [weights[name] * np.asarray(scores, float) for name, scores in parts.items()]
    return np.asarray(np.sum(weighted, axis=0))
