"""The files around the package: what a fresh checkout, an environment and a release rely on."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import yaml

import verl_lab

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAX_POLICY_BYTES = 4_000_000
MAX_YAML_LINES = 40
TARGETS = ["venv", "quickstart", "test", "lint", "bench", "clean"]


@pytest.mark.parametrize("name", verl_lab.__all__)
def test_every_public_name_can_be_imported(name):
    value = getattr(verl_lab, name)
    assert value.__module__.startswith("verl_lab.")
    assert value.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'verl_lab' has no attribute 'sesion'"):
        _ = verl_lab.sesion


def test_the_version_is_the_installed_one():
    assert verl_lab.__version__ == version("verl-lab")


def test_the_command_is_installed():
    (command,) = entry_points(group="console_scripts", name="verl-lab")
    assert command.value == "verl_lab.cli.app:main"


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target(target):
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_make_says_which_python_is_needed_where_there_is_none(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    done = subprocess.run(
        ["make", "PYTHON=", "venv"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Python 3.11 or newer" in done.stderr


def test_make_and_ci_look_for_the_pythons_that_the_project_supports():
    lowest = PROJECT["requires-python"].removeprefix(">=")
    for file in ("Makefile", ".ci/run"):
        asked = re.search(r"sys\.version_info < \((\d+), (\d+)\)", (ROOT / file).read_text())
        assert asked is not None
        assert ".".join(asked.groups()) == lowest
    assert sys.version_info >= tuple(map(int, lowest.split(".")))


def test_the_ci_script_is_a_program_without_syntax_errors():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_the_conda_environment_installs_the_package_with_extras_it_has():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    (extras,) = re.findall(r"^-e \.\[(.*)\]$", "\n".join(pip), flags=re.MULTILINE)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_shipped_policy_is_small_and_complete():
    folder = Path(verl_lab.__file__).parent / "models" / "tiny_policy"
    files = [path for path in folder.iterdir() if path.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= MAX_POLICY_BYTES


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_short(path):
    assert len(path.read_text().splitlines()) <= MAX_YAML_LINES
