import stat

import pytest

from verl_lab.errors import DataError
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


def test_only_runs_are_listed(tmp_path):
    RunFolder.create(tmp_path, "a", "x").write_config("a: 1")
    (tmp_path / "other").mkdir()
    assert [run.path.name for run in list_runs(tmp_path)] == ["a"]
    assert list_runs(tmp_path / "missing") == []


def test_the_environment_names_versions_and_machine():
    found = environment()
    assert found["versions"]["torch"].startswith("2.")
    assert found["num_cores"] >= 1
