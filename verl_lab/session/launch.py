"""Starting a controller from this process, through a fork server that is kept warm for the next
one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verl_lab.errors import DeadlineError, WorkerError
from verl_lab.runtime import folder
from verl_lab.runtime.launch.local import ENVIRONMENT, ForkServer, log_tail
from verl_lab.session.client import Client

if TYPE_CHECKING:
    from verl_lab.config.schema import LabConfig
    from verl_lab.store.folder import RunFolder

START_S = 120.0
"""Longest time until a controller answers; importing torch on a slow disk is most of it."""

_lock = threading.Lock()
_server: ForkServer | None = None
_server_pid = 0


def fork_server() -> ForkServer:
    """This process's fork server, started on first use and again if it is gone."""
    global _server, _server_pid
    with _lock:
        is_mine = _server_pid == os.getpid()  # not the parent's, after a fork
        if _server is None or not is_mine or folder.start_ticks(_server.pid) is None:
            _server = ForkServer.spawn(folder.fork_server_log(os.getpid()))
            _server_pid = os.getpid()
        return _server


def abandon() -> None:
    """Ends this process's fork server: a start that waits for it fails at once.

    Controllers that run already go on.
    """
    with _lock:
        if _server is not None and _server_pid == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(_server.pid, signal.SIGKILL)


def start_controller(
    config: LabConfig,
    run_folder: RunFolder,
    *,
    parts: dict[str, float] | None,
    functions: dict[str, bytes],
    own: dict[str, dict[str, str]],
    is_resume: bool,
    keep_alive_s: float,
    owner: str,
) -> Client:
    """Starts a controller for a run folder and attaches to it."""
    session_id = uuid.uuid4().hex[:8]
    spec: dict[str, Any] = {
        "session_id": session_id,
        "run_folder": str(run_folder.path.absolute()),
        "config": config.model_dump(mode="json"),
        "parts": parts,
        "functions": {name: data.hex() for name, data in functions.items()},
        "own": own,
        "is_resume": is_resume,
        "keep_alive_s": keep_alive_s,
        "owner": owner,
        "cwd": os.getcwd(),
        "sys_path": [entry or os.getcwd() for entry in sys.path],
        "environment": {**ENVIRONMENT, **os.environ},
    }
    log = run_folder.logs / "controller.log"
    folder.session_folder(session_id)
    server = fork_server()
    try:
        pid = server.fork("verl_lab.controller.process:main", spec, log)
    except WorkerError:
        folder.remove(session_id)
        raise
    deadline = time.monotonic() + START_S
    while (info := folder.read_info(session_id)) is None:
        if folder.start_ticks(pid) is None:
            raise WorkerError("controller", "died while it started", log_tail(log))
        if time.monotonic() > deadline:
            raise WorkerError("controller", f"did not start within {START_S:g} s", log_tail(log))
        time.sleep(0.01)
    return Client(info, owner)


def replace_abandoned(owner: str, devices: set[str]) -> None:
    """Closes idle sessions that this notebook left behind on devices that a new one wants."""
    for info in folder.sessions():
        if info.owner != owner or not devices & set(info.devices):
            continue
        with contextlib.suppress(WorkerError, DeadlineError):  # it leaves already
            _close_if_idle(Client(info, owner, is_look=True))


def _close_if_idle(client: Client) -> None:
    try:
        status = client.call("status", timeout_s=5.0)
        if status["state"] in ("idle", "failed") and not status["num_clients"]:
            client.call("close", timeout_s=5.0)
            client.wait_gone(10.0)
    finally:
        client.close()


def describe(info: folder.SessionInfo) -> dict[str, Any]:
    """What `ps` shows of a live session, whether it answers or not."""
    known = asdict(info)
    try:
        client = Client(info, "", is_look=True)
        try:
            return {**known, **client.call("status", timeout_s=2.0)}
        finally:
            client.close()
    except (WorkerError, TimeoutError):
        return {**known, "state": "gone"}
