"""The warm fork server: a process that has imported torch and forks itself on request.

Starting a process this way takes milliseconds instead of the seconds that importing torch takes.
The server never runs a tensor operation and never touches CUDA, so what it forks starts clean. Two
uses: a kernel keeps one to start controllers, and each controller keeps one to start its workers,
which is also its undertaker: when the controller is gone, it kills what is left and removes its
memory.

Requests and answers are JSON lines over a socket pair:
`{"target": "module:function", "spec": {...}, "log": path}` → `{"pid": n}`, and at any time
`{"exited": pid, "status": code}` (negative: the signal that ended it).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

WARM = (
    "verl_lab.controller.process",
    "verl_lab.engines.reward",
    "verl_lab.engines.rollout.service",
    "verl_lab.engines.trainer.service",
    "transformers.models.llama.modeling_llama",
)
"""Imported before the first fork; whatever else a process needs, it imports itself."""


def serve(connection: socket.socket, when_orphaned: Callable[[set[int]], None]) -> NoReturn:
    """Forks on request until the other end of `connection` is gone, then calls
    `when_orphaned(pids)`."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a notebook's Interrupt reaches whole process groups
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # keeps the shared pages shared

    children: set[int] = set()
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if wake_read in ready:
                wake_read.recv(4096)
            _reap(connection, children)
            if connection not in ready:
                continue
            try:
                data = connection.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                pid = _fork(json.loads(line), [connection, wake_read, wake_write])
                children.add(pid)
                _send(connection, {"pid": pid})
    when_orphaned(children)
    os._exit(0)


def _fork(request: dict[str, Any], inherited: list[socket.socket]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for sock in inherited:
            sock.close()
        os.setsid()
        redirect(request["log"])
        Path("/proc/self/comm").write_text(Path(request["log"]).stem[:15])  # as `top` shows it
        module, _, function = request["target"].partition(":")
        status = getattr(importlib.import_module(module), function)(request["spec"]) or 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:  # the child must never return into the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def redirect(log: str) -> None:
    """Sends this process's output, and its stack on SIGUSR1, to the end of a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    os.close(null)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    show_stacks()


def show_stacks() -> None:
    """Writes this process's stacks to its error output on SIGUSR1, and when it crashes."""
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _reap(connection: socket.socket, children: set[int]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            _send(connection, {"exited": pid, "status": os.waitstatus_to_exitcode(status)})


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):  # the loop sees the end of the connection next
        connection.sendall(json.dumps(message).encode() + b"\n")


def kill_groups(pids: set[int]) -> None:
    """Ends processes, and all that they started in their own sessions, at once."""
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def main() -> NoReturn:
    """Runs a server on the socket whose file descriptor is the first argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in WARM:
        importlib.import_module(module)
    serve(connection, when_orphaned=lambda pids: None)


if __name__ == "__main__":
    main()
