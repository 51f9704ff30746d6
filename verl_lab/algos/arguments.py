"""What the functions of this part refuse: tensors that do not fit together, names that do not
exist. Torch would broadcast the first, and an `if` would take the second for its last branch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from verl_lab.errors import ConfigError, ShapeError


def require_flat(**tensors: Tensor) -> None:
    """Checks that tensors are one-dimensional and equally long.

    Raises:
        ShapeError: they are not; names every tensor with its shape.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        found = ", ".join(f"{name} {shape}" for name, shape in zip(tensors, shapes, strict=True))
        raise ShapeError(
            f"{', '.join(tensors)}: must be one-dimensional and equally long, got {found}; "
            f"flatten or index them alike"
        )


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Checks a name against those that exist.

    Raises:
        ConfigError: it is none of them; lists them.
    """
    if value not in choices:
        raise ConfigError(f"{name}: no such choice {value!r}; use one of {', '.join(choices)}")


def call_options(
    function: Callable[..., Any], options: Mapping[str, Any], shared: Mapping[str, Any], key: str
) -> dict[str, Any]:
    """The keywords to call a named function with: its options, and of the shared ones those that
    it takes.

    Raises:
        ConfigError: an option is no parameter of the function; says which there are.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    unknown = [name for name in options if name not in names and not takes_all]
    if unknown:
        own = [
            p.name
            for p in parameters
            if p.kind is p.KEYWORD_ONLY and p.name not in ("num_tokens", "sample_index", *shared)
        ]
        there = f"it has {', '.join(own)}" if own else "it has none"
        raise ConfigError(
            f"{key}: {getattr(function, '__name__', function)} has no option {unknown[0]!r}; "
            f"{there}"
        )
    return {**{k: v for k, v in shared.items() if k in names or takes_all}, **options}
