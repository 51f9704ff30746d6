"""What verl_lab raises. Every message is `<dotted key or name>: <what is wrong, with the value>;
<what to do>`.

LabError
├── ConfigError(ValueError)     a config file or override is wrong; names every key that is
├── DeviceError(ValueError)     a requested device is missing
├── DataError(ValueError)       a dataset, task or model file cannot be used as asked
├── ShapeError(ValueError)      tensors or columns that must agree do not
├── RewardError(ValueError)     a reward function returned something that is no score
├── StateError(RuntimeError)    the call does not fit the session's state
├── DeadlineError(RuntimeError) a call to another process took longer than it may
└── WorkerError(RuntimeError)   another process failed; carries its name and the end of its log
"""

from __future__ import annotations


class LabError(Exception):
    """The base of all errors raised on purpose."""

    remote_traceback: str = ""
    """Where it was raised, if that was in another process."""


class ConfigError(LabError, ValueError):
    """A config file or override is wrong."""


class DeviceError(LabError, ValueError):
    """A requested device is missing."""


class DataError(LabError, ValueError):
    """A dataset, task or model file cannot be used as asked."""


class ShapeError(LabError, ValueError):
    """Tensors or columns that must agree do not."""


class RewardError(LabError, ValueError):
    """A reward function returned something that is no score."""


class StateError(LabError, RuntimeError):
    """The call does not fit the session's state."""


class DeadlineError(LabError, RuntimeError):
    """A call to another process took longer than it may."""


class WorkerError(LabError, RuntimeError):
    """Another process failed."""

    def __init__(self, worker: str, reason: str, log_tail: str = "") -> None:
        super().__init__(worker, reason, log_tail)  # all args, so that it can be rebuilt elsewhere
        self.worker, self.reason, self.log_tail = worker, reason, log_tail

    def __str__(self) -> str:
        end = f"\n--- end of its log ---\n{self.log_tail.rstrip()}" if self.log_tail else ""
        return f"{self.worker}: {self.reason}{end}"
