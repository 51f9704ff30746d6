"""What the functions of this part refuse: tensors that do not fit together, names that do not
exist. Torch would broadcast the first, and an `if` would take the second for its last branch."""

from __future__ import annotations

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
