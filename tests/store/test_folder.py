import json
import os
import stat
import subprocess
import sys

import pytest

from verl_lab.errors import ConfigError, DataError
from verl_lab.store.database import Reader, Recorder
from verl_lab.store.folder import RunFolder, environment, list_runs


def test_a_new_folder_is_private_and_has_its_parts(tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "first", "x")
    assert folder.path.name == "first"
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert all(part.is_dir() for part in (folder.samples, folder.checkpoints, folder.logs))


def test_a_name_that_is_taken_gets_the_next_number(tmp_path):
    names = [RunFolder.create(tmp_path, "a", "x").path.name for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]
    unnamed = [RunFolder.create(tmp_path, None, "tiny").path.name for _ in range(2)]
    assert unnamed == ["tiny-1", "tiny-2"]


def test_a_folder_that_is_no_run_names_those_near_it(tmp_path):
    RunFolder.create(tmp_path, "quickstart-1", "x").write_config("a: 1")
    with pytest.raises(
        DataError, match=r"quickstart-2: is no run folder; near it are quickstart-1"
    ):
        RunFolder.open(tmp_path / "quickstart-2")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0b"])
def test_a_name_cannot_lead_out_of_the_runs(tmp_path, name):
    with pytest.raises(ConfigError, match=r"^name: .* cannot be a folder's"):
        RunFolder.create(tmp_path / "runs", name, "x")
    assert list(tmp_path.iterdir()) == []


def test_runs_cannot_lie_under_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^runs_dir: .*file/runs cannot hold a new run"):
        RunFolder.create(tmp_path / "file" / "runs", "a", "x")


def test_settings_and_surroundings_are_replaced_whole(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "x")
    for steps in (1, 2):
        folder.write_config(f"steps: {steps}\n")
        folder.write_environment({"num_cores": steps})
    assert folder.config_path.read_text() == "steps: 2\n"
    assert json.loads(folder.environment_path.read_text()) == {"num_cores": 2}
    assert {path.name for path in folder.path.iterdir() if path.is_file()} == {
        "config.yaml",
        "environment.json",
    }


CLAIM = """
import sys
from verl_lab.store.folder import RunFolder
for _ in range(20):
    print(RunFolder.create(sys.argv[1], "same", "x").path.name)
"""


def test_processes_that_ask_at_once_get_folders_of_their_own(tmp_path):
    command = [sys.executable, "-c", CLAIM, str(tmp_path)]
    claims = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    names = [name for claim in claims for name in claim.communicate()[0].split()]
    assert len(names) == len(set(names)) == 60


def test_the_run_last_changed_is_last_and_looking_changes_nothing(tmp_path):
    for name, seconds in (("new", 3000), ("old", 1000), ("middle", 2000)):
        folder = RunFolder.create(tmp_path, name, "x")
        folder.write_config("a: 1")
        Recorder(folder).close()
        for path in (folder.config_path, folder.database):
            os.utime(path, (seconds, seconds))
    for _ in range(2):
        runs = list_runs(tmp_path)
        assert [run.path.name for run in runs] == ["old", "middle", "new"]
        with Reader(runs[0]) as reader:
            assert reader.metrics().empty


def test_only_runs_are_listed(tmp_path):
    RunFolder.create(tmp_path, "a", "x").write_config("a: 1")
    (tmp_path / "other").mkdir()
    assert [run.path.name for run in list_runs(tmp_path)] == ["a"]
    assert list_runs(tmp_path / "missing") == []


def test_the_environment_names_versions_and_machine():
    found = environment()
    assert found["versions"]["torch"].startswith("2.")
    assert found["num_cores"] >= 1
