"""The controller process: answers clients, keeps the lease, and outlives kernels by it.

A client holds a connection to the `lease` socket while it is there. When the last one goes, a run
under way goes on to its end; an idle session leaves after `keep_alive_s`. The end of a connection
is what counts, so a killed kernel is noticed as surely as one that says goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from verl_lab.config.functions import loads
from verl_lab.config.load import load_config
from verl_lab.controller.conductor import Conductor
from verl_lab.controller.experiment import Experiment
from verl_lab.errors import StateError
from verl_lab.runtime import folder
from verl_lab.runtime.launch.forkserver import kill_groups
from verl_lab.runtime.launch.local import ForkServer
from verl_lab.runtime.messages import Message, decode, describe_error, encode
from verl_lab.runtime.peer import cancelled
from verl_lab.runtime.supervisor import Supervisor, Surroundings
from verl_lab.runtime.worker import settle
from verl_lab.store.folder import RunFolder

log = logging.getLogger("controller")
FIRST_CLIENT_S = 60.0
"""How much longer than `keep_alive_s` the first client may take to come."""


@dataclass(frozen=True)
class ControllerSpec:
    """All a controller needs to begin; plain data."""

    session_id: str
    run_folder: str
    config: dict[str, Any]
    parts: dict[str, float] | None
    """Reward parts given in code, in place of the config's."""
    functions: dict[str, str]
    """Pickled reward functions by name, as hexadecimal text."""
    own: dict[str, dict[str, str]]
    """The user's own functions that the config names, as `config.functions.dumps` gave them."""
    is_resume: bool
    keep_alive_s: float
    owner: str
    cwd: str
    sys_path: list[str]
    environment: dict[str, str]


def main(data: dict[str, Any]) -> int:
    """Runs a controller to its end; returns the exit code."""
    spec = ControllerSpec(**data)
    settle(spec.cwd, spec.sys_path, spec.environment)

    def bury(pids: set[int]) -> None:
        kill_groups(pids)
        folder.remove(spec.session_id)

    server = ForkServer.branch(bury)  # first of all: this process must still be clean
    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(Controller(spec, server).live())
    return 0


class Controller:
    """Serves one session until it is closed or its lease ends."""

    def __init__(self, spec: ControllerSpec, server: ForkServer) -> None:
        self.spec = spec
        self.sockets = folder.session_folder(spec.session_id)
        self.memory = folder.memory_folder(spec.session_id)
        self.run_folder = RunFolder(Path(spec.run_folder))
        self.created = time.time()
        self.closing = asyncio.Event()
        self._server = server
        self._num_clients = 0
        self._idle_since = time.monotonic() + FIRST_CLIENT_S
        self._connections: set[asyncio.StreamWriter] = set()
        self._calls: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        """The whole life: open, serve, leave."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.closing.set)
        lease = await asyncio.start_unix_server(self._hold, str(self.sockets / "lease"))
        router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        router.bind(f"ipc://{self.sockets / 'rpc'}")
        supervisor = Supervisor(
            self._server,
            Surroundings(
                sockets=self.sockets,
                memory=self.memory,
                logs=self.run_folder.logs,
                cwd=self.spec.cwd,
                sys_path=self.spec.sys_path,
                environment=self.spec.environment,
            ),
        )
        loads(self.spec.own)
        config = load_config(self.spec.config)
        experiment = Experiment(config, self.run_folder, supervisor, self.memory)
        experiment.lab.own = self.spec.own
        self.conductor = Conductor(experiment)
        self._announce()
        starting = asyncio.create_task(self._start(), name="start")
        serving = asyncio.create_task(self._serve(router), name="serve")
        try:
            await self._until_over()
        finally:
            for task in (starting, serving, *self._calls):
                await cancelled(task)
            await self.conductor.stop_working()
            await supervisor.stop_all()
            self.conductor.experiment.close()
            router.close(linger=500)
            lease.close()
            folder.remove(self.spec.session_id)
            for connection in self._connections:
                connection.close()  # last: a client takes this end for the end of the session
            log.info("left")

    def status(self) -> dict[str, Any]:
        """Where the session stands, in plain data."""
        leaves_at = None
        if not self._num_clients and not self.conductor.is_working:
            leaves_at = self._idle_since + self.spec.keep_alive_s
        return {
            **self.conductor.status(),
            "session_id": self.spec.session_id,
            "pid": os.getpid(),
            "run_folder": str(self.run_folder.path),
            "owner": self.spec.owner,
            "num_clients": self._num_clients,
            "keep_alive_s": self.spec.keep_alive_s,
            "lease_ends_in_s": None
            if leaves_at is None
            else max(0.0, leaves_at - time.monotonic()),
        }

    async def _start(self) -> None:
        functions = {name: bytes.fromhex(text) for name, text in self.spec.functions.items()}
        await self.conductor.open(functions, parts=self.spec.parts, is_resume=self.spec.is_resume)

    def _announce(self) -> None:
        folder.write_info(
            folder.SessionInfo(
                id=self.spec.session_id,
                pid=os.getpid(),
                start_ticks=folder.start_ticks(os.getpid()) or 0,
                run_folder=str(self.run_folder.path),
                owner=self.spec.owner,
                devices=self.conductor.experiment.devices,
                created=self.created,
            )
        )

    async def _until_over(self) -> None:
        while not self.closing.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.closing.wait(), timeout=0.1)
            if self.conductor.is_working:
                self._idle_since = max(self._idle_since, time.monotonic())
            if self._num_clients:
                self._idle_since = time.monotonic()
            elif time.monotonic() - self._idle_since >= self.spec.keep_alive_s:
                log.info("lease over: no client for %g s", self.spec.keep_alive_s)
                await self.conductor.stop_well()
                return

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        is_client = (await reader.readline()).startswith(b"client")
        self._num_clients += is_client
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while await reader.read(64):
                continue
        self._num_clients -= is_client
        self._connections.discard(writer)
        writer.close()

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            client, *frames = await router.recv_multipart()
            task = asyncio.create_task(self._answer(router, client, decode(frames)))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _answer(self, router: zmq.asyncio.Socket, client: bytes, call: Message) -> None:
        try:
            answer = Message("reply", call.id, await self._call(**call.body))
        except Exception as error:  # carried to the client, who raises it
            answer = Message("error", call.id, describe_error(error))
        await router.send_multipart([client, *encode(answer, self.memory)])

    async def _call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if method == "status":
            return self.status()
        if method == "close":
            self.closing.set()
            return None
        if method not in Conductor.CALLS:
            raise StateError(f"{method}: no such call; use one of {sorted(Conductor.CALLS)}")
        result = getattr(self.conductor, method)(*args, **kwargs)
        return await result if asyncio.iscoroutine(result) else result
