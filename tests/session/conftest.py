import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from verl_lab.runtime import folder
from verl_lab.session.session import Session


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch):
    """A runtime folder of the test's own, so that tests neither see nor replace each other's
    sessions."""
    with tempfile.TemporaryDirectory(prefix="vl-") as path:
        monkeypatch.setenv("VERL_LAB_RUNTIME_DIR", path)
        yield Path(path)


@pytest.fixture
def config(small_config, tmp_path):
    return {**small_config, "runs_dir": str(tmp_path / "runs")}


@pytest.fixture
def config_file(config, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def open_session(config):
    """Makes sessions of the small config, and closes them after the test."""
    made = []

    def make(*overrides, **arguments):
        arguments.setdefault("config", None if arguments.get("resume") else config)
        session = Session(arguments.pop("config"), *overrides, **arguments)
        made.append(session)
        return session

    yield make
    for session in made:
        session.close()


class Kernel:
    """Another Python process that runs code of a test; it stands for a notebook's kernel."""

    def __init__(self, code, **popen):
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **popen,
        )

    def line(self):
        """The next line it prints."""
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def kernel():
    kernels = []

    def start(code, **popen):
        kernels.append(Kernel(code, **popen))
        return kernels[-1]

    yield start
    for each in kernels:
        each.end()


class Holdings:
    """The processes and the memory of one session, to see that they are gone."""

    def __init__(self, status):
        self.pids = [status["pid"], *(worker["pid"] for worker in status["workers"])]
        self.ticks = {pid: folder.start_ticks(pid) for pid in self.pids}
        self.folders = [
            folder.root() / status["session_id"],
            Path(f"/dev/shm/verl-lab-{os.getuid()}") / status["session_id"],
        ]
        assert all(self.ticks.values())
        assert all(path.exists() for path in self.folders)

    def left(self):
        """What is still there."""
        alive = [pid for pid in self.pids if folder.start_ticks(pid) == self.ticks[pid]]
        return [*alive, *(path for path in self.folders if path.exists())]

    def are_gone_within(self, seconds):
        return until(lambda: not self.left(), seconds)


def until(condition, seconds):
    """Waits for a condition; whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def holdings():
    return Holdings


@pytest.fixture
def wait_until():
    return until
