import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml


@pytest.fixture
def folder(small_config, tmp_path):
    """A folder with `small.yaml`, in which the commands run."""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small_config))
    return tmp_path


@pytest.fixture
def environment():
    """A runtime folder of the test's own, so that `ps` shows what the test started and no more."""
    with tempfile.TemporaryDirectory(prefix="vl-") as path:
        yield {**os.environ, "VERL_LAB_RUNTIME_DIR": path}
        for info in Path(path).glob("*/session.json"):  # of a test that failed
            os.kill(json.loads(info.read_text())["pid"], signal.SIGKILL)


@pytest.fixture
def start(folder, environment):
    """Starts a command as a process of its own, its output in pipes; ends it after the test."""
    started = []

    def _start(*args):
        command = [sys.executable, "-m", "verl_lab.cli", *map(str, args)]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
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
def run_folder(folder):
    """The only run folder that a test made."""

    def find():
        (path,) = Path(folder / "runs").iterdir()
        return path

    return find
