"""Reward functions given in code: turned into what travels to the reward workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl_lab.errors import ConfigError
from verl_lab.rewards.function import RewardFunction, reward

RewardParts = (
    Callable[..., Any] | RewardFunction | Mapping[str, float | tuple[Callable[..., Any], float]]
)
"""A function, or parts by name: `(function, weight)`, or a weight alone for `task` and files."""


def as_parts(given: RewardParts | None) -> tuple[dict[str, float] | None, dict[str, bytes]]:
    """Weights by part, and the pickled functions among them; `(None, {})` where nothing was
    given."""
    if given is None:
        return None, {}
    if not isinstance(given, Mapping):
        function = _as_function(given)
        return {function.name: 1.0}, {function.name: function.dumps()}
    parts: dict[str, float] = {}
    functions: dict[str, bytes] = {}
    for name, part in given.items():
        if isinstance(part, int | float):
            parts[name] = float(part)
        elif isinstance(part, tuple) and len(part) == 2:
            parts[name] = float(part[1])
            functions[name] = _as_function(part[0]).dumps()
        else:
            raise ConfigError(
                f"reward.{name}: is {part!r}; give (function, weight), or a weight for `task`"
            )
    return parts, functions


def _as_function(given: Any) -> RewardFunction:
    return given if isinstance(given, RewardFunction) else reward(given)
