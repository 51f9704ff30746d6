"""A lab bench for reinforcement learning of language models that lives in a notebook.

    import verl_lab as lab

    with lab.Session("configs/quickstart.yaml") as session:
        run = session.train(steps=20)
        run.wait()

Names are imported when they are first used, so that `import verl_lab` is quick and without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_lab.batch.columns import Batch
    from verl_lab.config.functions import advantage, policy_loss, recipe
    from verl_lab.config.load import load_config
    from verl_lab.config.schema import LabConfig
    from verl_lab.errors import (
        ConfigError,
        DataError,
        DeadlineError,
        DeviceError,
        LabError,
        RewardError,
        ShapeError,
        StateError,
        WorkerError,
    )
    from verl_lab.rewards.function import reward
    from verl_lab.session.registry import attach, ps, runs
    from verl_lab.session.run import Run
    from verl_lab.session.session import Session

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "DeviceError",
    "LabConfig",
    "LabError",
    "RewardError",
    "Run",
    "Session",
    "ShapeError",
    "StateError",
    "WorkerError",
    "advantage",
    "attach",
    "load_config",
    "policy_loss",
    "ps",
    "recipe",
    "reward",
    "runs",
]

_HOME = {
    "Batch": "batch.columns",
    "LabConfig": "config.schema",
    "Run": "session.run",
    "Session": "session.session",
    "advantage": "config.functions",
    "attach": "session.registry",
    "load_config": "config.load",
    "policy_loss": "config.functions",
    "ps": "session.registry",
    "recipe": "config.functions",
    "reward": "rewards.function",
    "runs": "session.registry",
}
"""The module of each public name; the errors' is `errors`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'verl_lab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"verl_lab.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
