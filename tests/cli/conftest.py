import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

SMALL = {
    "steps": 4,
    "model": {"name_or_path": "package://verl_lab/models/tiny_policy"},
    "task": {"name": "add_compare"},
    "rollout": {
        "rollout_batch_size": 16, "group_size": 4, "max_new_tokens": 8, "device_map": "cpu:0",
    },
    "trainer": {"train_batch_size": 16, "learning_rate": 1e-4, "device_map": "cpu:0"},
    "eval": {"every_steps": 2, "num_prompts": 16},
    "checkpoint": {"every_steps": 2},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A folder with `small.yaml`, in which the commands run."""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    return tmp_path


@pytest.fixture
def environment():
    """A runtime folder of the test's own, so that `ps` shows what the test started and no more."""
    with tempfile.TemporaryDirectory(prefix="vl-") as path:
        yield {**os.environ, "VERL_LAB_RUNTIME_DIR": path}


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
