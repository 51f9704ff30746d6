import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path

import pytest

from verl_lab.runtime.launch.local import ForkServer
from verl_lab.runtime.supervisor import Supervisor, Surroundings


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = ForkServer.spawn(tmp_path_factory.mktemp("server") / "log")
    yield server
    server.close()


@pytest.fixture
def run_with_workers(server, tmp_path):
    """Runs `scenario(supervisor)` in an event loop with a lease socket, and stops all workers
    after."""

    def run(scenario):
        with tempfile.TemporaryDirectory(prefix="vl-") as sockets:
            return asyncio.run(_run(server, Path(sockets), tmp_path, scenario))

    return run


async def _run(server, sockets, tmp_path, scenario):
    held = []

    async def hold(reader, writer):
        held.append(writer)
        with contextlib.suppress(ConnectionError):
            while await reader.read(64):
                continue

    lease = await asyncio.start_unix_server(hold, str(sockets / "lease"))
    here = str(Path(__file__).parent)
    supervisor = Supervisor(
        server,
        Surroundings(
            sockets=sockets,
            memory=tmp_path,
            logs=tmp_path,
            cwd=str(tmp_path),
            sys_path=[here, *sys.path],
            environment=dict(os.environ),
        ),
    )
    try:
        return await asyncio.wait_for(scenario(supervisor), 60)
    finally:
        await supervisor.stop_all()
        for peer in supervisor.peers.values():
            peer.close()
        lease.close()
        for writer in held:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
