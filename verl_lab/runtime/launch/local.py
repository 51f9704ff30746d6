"""The local launcher: starts processes on this machine through a warm fork server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_lab.errors import WorkerError
from verl_lab.runtime.launch import forkserver

ENVIRONMENT = {
    # OpenMP threads that spin for long beside a busy core make small operations ten times slower.
    "GOMP_SPINCOUNT": "1000",
    # MKL else adds up in another order when a matrix has other rows beside it.
    "MKL_CBWR": "AUTO,STRICT",
    # Asking NVML instead of CUDA whether there is a GPU leaves CUDA untouched before a fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""What our processes run under, where the user has not said otherwise."""


class ForkServer:
    """One fork server, seen from the process that uses it. Thread-safe.

    `on_exit(pid, status)` is called for each end of a process that it forked, from `poll` or from a
    waiting `fork`.
    """

    def __init__(self, connection: socket.socket, pid: int, log: Path | None = None) -> None:
        self.pid = pid
        self.on_exit: Callable[[int, int], None] = lambda pid, status: None
        self._connection, self._log = connection, log
        self._pending = b""
        self._lock = threading.Lock()

    @classmethod
    def spawn(cls, log: Path) -> ForkServer:
        """Starts a server from scratch; it is warm in the seconds that importing torch takes.

        It leaves when this process does. What it forked goes on.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", forkserver.__name__, str(theirs.fileno())]
        package_root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": path}
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        process.returncode = 0  # nobody waits for it: silences Popen's warning at interpreter exit
        return cls(ours, process.pid, log)

    @classmethod
    def branch(cls, when_orphaned: Callable[[set[int]], None]) -> ForkServer:
        """Forks a server off this process, which must still be single-threaded and clean.

        When this process is gone, the server calls `when_orphaned` with the pids that are left.
        """
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            forkserver.serve(theirs, when_orphaned)
        theirs.close()
        return cls(ours, pid)

    def fork(self, target: str, spec: dict[str, Any], log: Path) -> int:
        """Starts `module:function(spec)` in a process of its own session; returns its pid."""
        request = {"target": target, "spec": spec, "log": str(log)}
        with self._lock:
            try:
                self._connection.sendall(json.dumps(request).encode() + b"\n")
                while True:
                    for answer in self._receive():
                        if "pid" in answer:
                            return int(answer["pid"])
            except OSError as error:
                raise WorkerError("fork server", f"is gone ({error})", self._log_tail()) from error

    def poll(self) -> None:
        """Reads what has come in, and calls `on_exit` for it. Blocks while nothing has."""
        with self._lock:
            self._receive()

    def fileno(self) -> int:
        """Readable when `poll` would not block."""
        return self._connection.fileno()

    def close(self) -> None:
        """Lets the server go."""
        self._connection.close()

    def _receive(self) -> list[dict[str, Any]]:
        data = self._connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("it closed the connection")
        *lines, self._pending = (self._pending + data).split(b"\n")
        answers = [json.loads(line) for line in lines]
        for answer in answers:
            if "exited" in answer:
                self.on_exit(answer["exited"], answer["status"])
        return answers

    def _log_tail(self) -> str:
        return "" if self._log is None else log_tail(self._log)


def log_tail(path: Path, lines: int = 50) -> str:
    """The end of a log file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def describe_exit(status: int) -> str:
    """An exit status in words: `exit code 3`, `signal 9 (SIGKILL)`."""
    if status >= 0:
        return f"exit code {status}"
    return f"signal {-status} ({signal.Signals(-status).name})"
