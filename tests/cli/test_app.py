import subprocess
import sys

import pytest

from verl_lab import __version__
from verl_lab.cli.exits import exit_code
from verl_lab.errors import ConfigError, DataError, DeviceError, StateError, WorkerError


def test_help_has_every_command_and_an_example(verl_lab):
    code, out, _ = verl_lab("--help")
    text = "\n".join(out)
    assert code == 0
    for command in ("train", "check", "ps", "attach", "stop", "runs", "doctor"):
        assert command in text
    assert "Example: verl-lab train" in text


def test_the_version_is_printed(verl_lab):
    assert verl_lab("--version") == (0, [f"verl-lab {__version__}"], "")


def test_the_commands_start_without_the_heavy_modules():
    code = "import verl_lab.cli.commands, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "transformers", "pandas", "pyarrow", "psutil"} & set(done.stdout.split())


@pytest.mark.parametrize(
    "args",
    [
        ("trian",),
        ("train", "--confg", "small.yaml"),
        ("train",),
        ("check",),
        ("attach",),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_no_traceback(verl_lab, args):
    code, _, err = verl_lab(*args)
    assert code == 2
    assert "Traceback" not in err
    assert "Usage: verl-lab" in err


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_wrong_config_exits_with_2_and_names_every_key(verl_lab, command):
    code, _, err = verl_lab(
        command, "--config", "small.yaml", "rollout.group_sise=4", "trainer.learning_rate=-1"
    )
    assert code == 2
    assert "Traceback" not in err
    assert "rollout.group_sise: no such key; did you mean rollout.group_size?" in err
    assert "trainer.learning_rate" in err


def test_a_missing_config_file_exits_with_2_and_names_it(verl_lab):
    code, _, err = verl_lab("check", "--config", "nowhere.yaml")
    assert code == 2
    assert "nowhere.yaml" in err
    assert "Traceback" not in err


def test_a_missing_device_exits_with_2_and_says_what_there_is(verl_lab):
    code, _, err = verl_lab("check", "--config", "small.yaml", "rollout.device_map=cuda:77")
    assert code == 2
    assert "cuda:77" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a: is wrong"), 2),
        (DeviceError("cuda:9: is missing"), 2),
        (DataError("p.jsonl: is missing"), 2),
        (StateError("train: nothing left to do"), 1),
        (WorkerError("trainer-0", "died with exit code 9"), 1),
    ],
)
def test_the_exit_code_tells_wrong_input_from_a_failed_run(error, code):
    assert exit_code(error) == code
