"""Who is looking: a person at a notebook, a notebook that runs by itself, a terminal or a
script."""

from __future__ import annotations

import os
from typing import Literal

Frontend = Literal["live", "headless", "terminal", "script"]
KEEP_ALIVE_S: dict[Frontend, float] = {
    "live": 600.0,
    "headless": 5.0,
    "terminal": 5.0,
    "script": 5.0,
}
"""How long an idle session outlives its last client, by who made it."""


def frontend() -> Frontend:
    """Asks IPython; a request that allows standard input comes from a person.

    `VERL_LAB_FRONTEND` overrides the answer.
    """
    forced = os.environ.get("VERL_LAB_FRONTEND")
    if forced in KEEP_ALIVE_S:
        return forced
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return "script"
    shell = get_ipython()
    if shell is None:
        return "script"
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return "terminal"
    get_parent = getattr(shell, "get_parent", None) or kernel.get_parent
    content = (get_parent() or {}).get("content", {})
    return "live" if content.get("allow_stdin") else "headless"


def owner() -> str:
    """Names this notebook or process, so that a restarted kernel is known as the same notebook."""
    return os.environ.get("JPY_SESSION_NAME") or f"pid {os.getpid()}"
