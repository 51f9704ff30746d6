"""Starting, watching, replacing and stopping the workers of one session."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from verl_lab.errors import LabError
from verl_lab.runtime.launch.local import ForkServer
from verl_lab.runtime.peer import Peer, gather
from verl_lab.runtime.worker import WorkerSpec

START_DEADLINE_S = 600.0
"""A worker that loads a large model from a slow disk gives no sign of life for long."""
STOP_LADDER = ((signal.SIGTERM, 1.0), (signal.SIGKILL, 3.0))
"""Signals in order, and how long each may take."""


@dataclass(frozen=True)
class Surroundings:
    """What every worker of a session shares."""

    sockets: Path
    memory: Path
    logs: Path
    cwd: str
    sys_path: list[str]
    environment: dict[str, str]


class Supervisor:
    """The workers of a session by name.

    `on_change(event, peer)` is told of `started` and `ended`.
    """

    def __init__(
        self,
        server: ForkServer,
        surroundings: Surroundings,
    ) -> None:
        self.peers: dict[str, Peer] = {}
        self.num_restarts: Counter[str] = Counter()
        self.on_change: Callable[[str, Peer], None] = lambda event, peer: None
        self.target = "verl_lab.runtime.worker:run"
        self._server, self._where = server, surroundings
        self._specs: dict[str, WorkerSpec] = {}
        self._incarnations: Counter[str] = Counter()
        self._early_exits: dict[int, int] = {}
        server.on_exit = self._ended
        asyncio.get_running_loop().add_reader(server.fileno(), self._poll)

    async def start(self, name: str, device: str, service: str, arguments: dict[str, Any]) -> Peer:
        """Starts a worker and waits until its service is there."""
        self._specs[name] = WorkerSpec(
            name=name,
            device=device,
            service=service,
            arguments=arguments,
            address="",
            lease=str(self._where.sockets / "lease"),
            spill=str(self._where.memory),
            cwd=self._where.cwd,
            sys_path=self._where.sys_path,
            environment=self._where.environment,
        )
        return await self._launch(name)

    async def restart(self, name: str, arguments: dict[str, Any] | None = None) -> Peer:
        """Replaces a worker, ending it first if it still runs."""
        await self.stop(name)
        self.num_restarts[name] += 1
        if arguments is not None:
            self._specs[name] = replace(self._specs[name], arguments=arguments)
        return await self._launch(name)

    async def stop(self, name: str) -> None:
        """Ends a worker, politely first."""
        peer = self.peers.get(name)
        if peer is None:
            return
        peer.is_stopping = True
        for number, patience_s in STOP_LADDER:
            if not peer.is_alive or peer.pid is None:
                break
            _signal_group(peer.pid, number)
            until = time.monotonic() + patience_s
            while peer.is_alive and time.monotonic() < until:
                await asyncio.sleep(0.01)
        peer.close()

    async def stop_all(self) -> None:
        """Ends all workers at the same time."""
        await gather(*(self.stop(name) for name in self.peers))
        asyncio.get_running_loop().remove_reader(self._server.fileno())

    def describe(self) -> list[dict[str, Any]]:
        """What each worker is and does, in plain data."""
        return [
            {
                "name": peer.name,
                "role": peer.name.rpartition("-")[0],
                "device": peer.device,
                "pid": peer.pid,
                "state": (peer.stage or "idle") if peer.is_alive else "dead",
                "rss_bytes": _rss_bytes(peer.pid) if peer.is_alive and peer.pid else 0,
                "num_restarts": self.num_restarts[peer.name],
            }
            for peer in self.peers.values()
        ]

    async def _launch(self, name: str) -> Peer:
        incarnation = self._incarnations[name]
        self._incarnations[name] += 1
        address = f"ipc://{self._where.sockets / name}-{incarnation}"
        spec = replace(self._specs[name], address=address)
        log = self._where.logs / f"{name}.log"
        peer = Peer(name, spec.device, address, log, self._where.memory)
        self.peers[name] = peer
        peer.pid = self._server.fork(self.target, spec.packed(), log)
        if peer.pid in self._early_exits:
            self._ended(peer.pid, self._early_exits.pop(peer.pid))
        self.on_change("started", peer)
        try:
            await peer.ready(START_DEADLINE_S)
        except LabError:
            await self.stop(name)
            raise
        return peer

    def _poll(self) -> None:
        try:
            self._server.poll()
        except ConnectionError:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            for peer in self.peers.values():  # nobody is left to tell how they end
                if peer.is_alive:
                    _signal_group(peer.pid or 0, signal.SIGKILL)
                    peer.ended(-signal.SIGKILL)

    def _ended(self, pid: int, status: int) -> None:
        peer = next((peer for peer in self.peers.values() if peer.pid == pid), None)
        if peer is None:
            self._early_exits[pid] = status
            return
        peer.ended(status)
        self.on_change("ended", peer)


def _rss_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
