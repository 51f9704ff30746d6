"""The controller's side of one worker: numbered calls with a deadline, each answered once or
failed.

A deadline counts from the last sign of life of the call (its start, or a progress report), so a
long generation that moves is not late and a hung one is found in the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from verl_lab.errors import DeadlineError, WorkerError
from verl_lab.runtime.launch.local import describe_exit, log_tail
from verl_lab.runtime.messages import Message, decode, encode, rebuild_error
from verl_lab.runtime.worker import READY

Progress = Callable[[dict[str, Any]], None]


class _Call:
    def __init__(self, what: str, on_report: Progress | None, grace_s: float = 0.0) -> None:
        self.what, self.on_report = what, on_report
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.grace_s = grace_s
        self.alive_at = time.monotonic() + grace_s


class Peer:
    """One worker, from the moment it is asked for until it is gone."""

    def __init__(self, name: str, device: str, address: str, log: Path, spill: Path) -> None:
        self.name, self.device, self.log, self.address = name, device, log, address
        self.pid: int | None = None
        self.exit_status: int | None = None
        self.is_stopping = False
        self._spill = spill
        self._numbers = itertools.count(READY + 1)
        self._calls: dict[int, _Call] = {READY: _Call("start", None)}
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.bind(address)
        self._reader = asyncio.create_task(self._read(), name=f"read {name}")
        self._reader.add_done_callback(self._stopped_reading)

    @property
    def is_alive(self) -> bool:
        """Whether the process is there to be called."""
        return self.pid is not None and self.exit_status is None

    @property
    def stage(self) -> str | None:
        """What it is doing: the oldest call under way."""
        return next((call.what for call in self._calls.values()), None)

    async def ready(self, deadline_s: float) -> None:
        """Waits until the worker has built its service."""
        await self._wait(READY, deadline_s)

    async def call(
        self,
        method: str,
        *args: Any,
        deadline_s: float,
        grace_s: float = 0.0,
        on_report: Progress | None = None,
        **kwargs: Any,
    ) -> Any:
        """The result of one method of the worker's service.

        Args:
            method: its name.
            args: plain data and batches.
            deadline_s: longest time without a sign of life.
            grace_s: how much longer it may take to the first sign of life, and from one that says
                `is_back` to the answer.
            on_report: is told of progress.
            kwargs: plain data and batches.

        Raises:
            WorkerError: it died, or raised something that is not ours.
            DeadlineError: there was no sign of life for `deadline_s` seconds.
            LabError: what it raised, if that is one of ours.
        """
        if not self.is_alive:
            raise self._death()
        number = next(self._numbers)
        self._calls[number] = _Call(method, on_report, grace_s)
        body = {"method": method, "args": args, "kwargs": kwargs}
        frames = encode(Message("call", number, body), self._spill)
        # Sending blocks for ever where the other end has just died, so it is not waited for alone.
        sending = asyncio.ensure_future(self._socket.send_multipart(frames))
        try:
            return await self._wait(number, deadline_s)
        finally:
            sending.cancel()

    def ended(self, status: int) -> None:
        """Takes note of the process's end; every call under way fails now."""
        self.exit_status = status
        self._fail(lambda call: self._death(call.what))

    def close(self) -> None:
        """Frees the socket."""
        self._reader.cancel()
        self._socket.close()

    async def _wait(self, number: int, deadline_s: float) -> Any:
        call = self._calls[number]
        try:
            while True:
                left = call.alive_at + deadline_s - time.monotonic()
                # In slices: a report may end the grace, and bring the deadline nearer.
                patience = min(max(left, 0.0), deadline_s / 4)
                done, _ = await asyncio.wait([call.result], timeout=patience)
                if done:
                    return call.result.result()
                if time.monotonic() - call.alive_at >= deadline_s:
                    await self._dump_stack()
                    raise DeadlineError(
                        f"{self.name}: gave no sign of life for {deadline_s:g} s during "
                        f"`{call.what}`; its log is {self.log}\n{log_tail(self.log)}"
                    )
        finally:
            self._calls.pop(number, None)

    async def _dump_stack(self) -> None:
        """Has the worker write into its log where it is."""
        if self.is_alive and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
                await asyncio.sleep(0.1)

    async def _read(self) -> None:
        while True:
            message = decode(await self._socket.recv_multipart())
            call = self._calls.get(message.id)
            if call is None or call.result.done():
                continue  # the late answer to a call that was given up
            if message.kind == "report":
                is_back = "is_back" in message.body  # out of the user's code: the grace again
                call.alive_at = time.monotonic() + (call.grace_s if is_back else 0.0)
                if call.on_report is not None:
                    call.on_report(message.body)
            elif message.kind == "reply":
                call.result.set_result(message.body)
            else:
                call.result.set_exception(rebuild_error(message.body, self.name))

    def _stopped_reading(self, reader: asyncio.Task[None]) -> None:
        error = None if reader.cancelled() else reader.exception()
        if error is not None:
            self._fail(lambda call: WorkerError(self.name, f"sent what cannot be read: {error!r}"))

    def _fail(self, why: Callable[[_Call], WorkerError]) -> None:
        for call in self._calls.values():
            if not call.result.done():
                call.result.set_exception(why(call))
                call.result.exception()  # so that one nobody waits for does not warn

    def _death(self, during: str | None = None) -> WorkerError:
        how = "never started" if self.exit_status is None else describe_exit(self.exit_status)
        stage = f" during `{during}`" if during else ""
        return WorkerError(self.name, f"died with {how}{stage}", log_tail(self.log))


async def gather(*work: Any) -> list[Any]:
    """Runs all at the same time; when one fails, waits for the others, then raises the first
    error."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def cancelled(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task and waits until it has ended."""
    if task is not None and not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
