"""A connection to a controller: holds the lease, and makes calls.

Every call has a socket of its own, so calls from several threads do not wait for each other, and
the late answer to a call that was given up goes nowhere. Waiting is done in slices, so an
interrupt ends it at once.
"""

from __future__ import annotations

import itertools
import select
import socket
import time
from pathlib import Path
from typing import Any

import zmq

from verl_lab.errors import DeadlineError, WorkerError
from verl_lab.runtime import folder
from verl_lab.runtime.launch.local import log_tail
from verl_lab.runtime.messages import Message, decode, encode, rebuild_error

SLICE_MS = 100


class Client:
    """One attached client of a live session.

    Args:
        info: which session.
        owner: who this client is.
        is_look: only look; it keeps nothing alive.
    """

    def __init__(self, info: folder.SessionInfo, owner: str, *, is_look: bool = False) -> None:
        self.info = info
        self._sockets = folder.root() / info.id
        self._numbers = itertools.count(1)
        self._lease = socket.socket(socket.AF_UNIX)
        try:
            self._lease.connect(str(self._sockets / "lease"))
            self._lease.sendall(f"{'look' if is_look else 'client'} {owner}\n".encode())
        except OSError as error:
            self._lease.close()
            raise self._gone(f"cannot be reached ({error})") from error

    @property
    def is_alive(self) -> bool:
        """Whether the controller is there."""
        if self._lease.fileno() < 0:
            return False
        readable, _, _ = select.select([self._lease], [], [], 0)
        return not readable  # it never sends, so readable means ended

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """The controller's answer.

        Raises:
            DeadlineError: there was none within `timeout_s` seconds.
            WorkerError: the controller is gone.
            LabError: what the call itself raised.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        number = next(self._numbers)
        body = {"method": method, "args": args, "kwargs": kwargs}
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        dealer.linger = 0
        try:
            dealer.connect(f"ipc://{self._sockets / 'rpc'}")
            dealer.send_multipart(encode(Message("call", number, body)))
            while not dealer.poll(SLICE_MS):
                if not self.is_alive:
                    raise self._gone(f"ended during `{method}`")
                if deadline is not None and time.monotonic() > deadline:
                    raise DeadlineError(
                        f"controller: no answer to `{method}` within {timeout_s:g} s; "
                        f"its log is {self._log}"
                    )
            answer = decode(dealer.recv_multipart())
        finally:
            dealer.close()
        if answer.kind == "error":
            raise rebuild_error(answer.body, "controller")
        return answer.body

    def wait_gone(self, timeout_s: float) -> bool:
        """Waits for the end of the controller; returns whether it came."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive or self.info.is_alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """Gives up this client's part of the lease."""
        self._lease.close()

    @property
    def _log(self) -> Path:
        return Path(self.info.run_folder) / "logs" / "controller.log"

    def _gone(self, how: str) -> WorkerError:
        return WorkerError(
            "controller",
            f"{how}; go on with `verl-lab train --resume {self.info.run_folder}`",
            log_tail(self._log),
        )
