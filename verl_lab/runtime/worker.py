"""A worker process: builds one service and answers calls to its methods, one at a time.

It leaves on its own when the controller is gone: it holds a connection to the controller's lease
socket, and the end of that connection ends the process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from verl_lab.runtime.launch.forkserver import show_stacks
from verl_lab.runtime.messages import Message, decode, describe_error, encode

REPORT_EVERY_S = 0.1
READY = 0
"""The id of the message that says a worker has built its service (a `reply`) or could not (an
`error`)."""


@dataclass(frozen=True)
class WorkerSpec:
    """All a worker process needs to begin; plain data, so that any launcher can carry it."""

    name: str
    device: str
    service: str
    """`module:Class`, built with `arguments`."""
    arguments: dict[str, Any]
    """Plain data; `bytes` are allowed."""
    address: str
    lease: str
    spill: str
    cwd: str
    sys_path: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def packed(self) -> dict[str, Any]:
        """As JSON-safe data."""
        return {
            **asdict(self),
            "arguments": encode(Message("call", READY, self.arguments))[0].hex(),
        }

    @classmethod
    def unpacked(cls, data: dict[str, Any]) -> WorkerSpec:
        """The inverse of `packed`."""
        return cls(**{**data, "arguments": decode([bytes.fromhex(data["arguments"])]).body})


def run(data: dict[str, Any]) -> NoReturn:
    """Runs a worker until it is killed or its lease ends."""
    spec = WorkerSpec.unpacked(data)
    settle(spec.cwd, spec.sys_path, spec.environment)
    if spec.device.startswith("cuda") and _has_forked_cuda():
        run_fresh(data)
    _leave_with(spec.lease)
    from verl_lab.runtime.devices import occupy

    device = occupy(spec.device)
    import zmq

    socket_ = zmq.Context().socket(zmq.DEALER)
    socket_.connect(spec.address)
    spill = Path(spec.spill)
    desk = Desk(lambda message: socket_.send_multipart(encode(message, spill), copy=False))
    module, _, name = spec.service.partition(":")
    desk.answer(
        READY,
        lambda: desk.open(getattr(importlib.import_module(module), name), spec.arguments, device),
    )
    while True:  # also where the service could not be built: the controller ends this process then
        call = decode(socket_.recv_multipart())
        desk.answer(call.id, lambda call=call: desk.call(**call.body))  # type: ignore[misc]


def run_fresh(data: dict[str, Any]) -> NoReturn:
    """Becomes a new interpreter that runs the worker, for what cannot live in a forked one."""
    spec = WorkerSpec.unpacked(data)
    settle(spec.cwd, spec.sys_path, spec.environment)
    path = Path(spec.spill, f"{spec.name}.json")
    path.write_text(json.dumps(data))
    search = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", __name__, str(path)]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": search})


def _has_forked_cuda() -> bool:
    """Whether CUDA was touched before this process was forked, so that it cannot be used here."""
    import torch

    return bool(torch.cuda._is_in_bad_fork())


class Desk:
    """Serves one object: runs calls, and sends results, errors and progress."""

    def __init__(self, send: Callable[[Message], Any]) -> None:
        self._send = send
        self._service: Any = None
        self._id = READY
        self._reported_at = float("-inf")

    def open(self, service: type, arguments: dict[str, Any], device: str) -> None:
        """Builds the service; `device` and `report` are passed to those that ask for them."""
        extra = {"device": device, "report": self.report}
        wanted = inspect.signature(service).parameters
        self._service = service(**arguments, **{k: v for k, v in extra.items() if k in wanted})

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """One call of a public method."""
        if method.startswith("_"):
            raise AttributeError(f"{method} is private")
        return getattr(self._service, method)(*args, **kwargs)

    def answer(self, number: int, work: Callable[[], Any]) -> None:
        """Runs `work` and sends its result or its error."""
        self._id = number
        try:
            reply = Message("reply", number, work())
        except Exception as error:  # carried to the caller, who raises it
            reply = Message("error", number, describe_error(error))
        self._send(reply)

    def report(self, progress: dict[str, Any]) -> None:
        """Sends progress of the call under way, which also is a sign of life."""
        now = time.monotonic()
        if (
            progress.keys() & {"row", "call", "is_back"}
            or now - self._reported_at >= REPORT_EVERY_S
        ):
            self._reported_at = now
            self._send(Message("report", self._id, progress))


def settle(cwd: str, sys_path: list[str], environment: dict[str, str]) -> None:
    """Takes on the surroundings of the process that asked for this one."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = [*sys_path, *(entry for entry in sys.path if entry not in sys_path)]


def _leave_with(lease: str) -> None:
    """Ends this process at once when the other end of the lease socket is gone."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(lease)
    connection.sendall(b"worker\n")

    def watch() -> None:
        while connection.recv(64):
            continue
        os._exit(3)

    threading.Thread(target=watch, name="lease", daemon=True).start()


if __name__ == "__main__":
    show_stacks()
    given = Path(sys.argv[1])
    text = given.read_text()
    given.unlink()
    run(json.loads(text))
