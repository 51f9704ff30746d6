"""How commands end.

Exit codes: 0 well, 1 a run or call failed, 2 wrong usage, config, data or devices, 130 interrupted.
"""

from __future__ import annotations

from verl_lab.errors import ConfigError, DataError, DeviceError, LabError

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
"""After Ctrl-C, as shells have it."""


def exit_code(error: LabError) -> int:
    """2 for what the user has to change before anything can start, else 1."""
    is_input = isinstance(error, ConfigError | DeviceError | DataError)
    return WRONG_INPUT if is_input else FAILED
