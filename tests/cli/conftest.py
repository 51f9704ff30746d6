import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml


@pytest.fixture
def folder(tmp_path, small_config):
    """A folder with `small.yaml`, in which the commands run."""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small_config))
    return tmp_path


class Sessions:
    """The sessions that a test's commands start, in a runtime folder of the test's own."""

    def __init__(self, folder):
        self.folder = folder
        self.seen = set()

    def live(self):
        """Their ids."""
        found = {path.name for path in self.folder.iterdir() if path.is_dir()}
        self.seen |= found
        return found

    def left(self):
        """What is still there of all that were seen: folders here, and in shared memory."""
        memory = Path(f"/dev/shm/verl-lab-{os.getuid()}")
        return [*self.live(), *(str(memory / id_) for id_ in self.seen if (memory / id_).exists())]

    def kill(self):
        """Ends them by force; a controller's fork server buries the workers and the folders."""
        for info in self.folder.glob("*/session.json"):
            with suppress(OSError):
                os.kill(json.loads(info.read_text())["pid"], signal.SIGKILL)
        until(lambda: not self.live(), seconds=5)


def until(condition, seconds):
    """Waits for a condition; whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def wait_until():
    return until


@pytest.fixture
def sessions():
    with tempfile.TemporaryDirectory(prefix="vl-") as path:
        found = Sessions(Path(path))
        yield found
        found.kill()


@pytest.fixture
def start(folder, sessions):
    """Starts a command as a process of its own, its output in pipes; ends it after the test."""
    started = []

    def _start(*args):
        process = subprocess.Popen(
            [sys.executable, "-m", "verl_lab.cli", *map(str, args)],
            cwd=folder,
            env={**os.environ, "VERL_LAB_RUNTIME_DIR": str(sessions.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield _start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def verl_lab(start):
    """Runs a command to its end: `(exit code, output lines, error output)`."""

    def run(*args):
        process = start(*args)
        out, err = process.communicate(timeout=100)
        return process.returncode, out.splitlines(), err

    return run


@pytest.fixture
def lines_until():
    """Reads a command's output up to a line with `pattern`."""

    def read(process, pattern):
        seen = []
        for line in process.stdout:
            seen.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return seen
        raise AssertionError("\n".join([f"no line with {pattern}:", *seen, process.stderr.read()]))

    return read
