import json
import os

import pytest

from verl_lab.config.sources import checkpoint_of, find, is_run, model_problem, pinned
from verl_lab.errors import DataError

TINY = "package://verl_lab/models/tiny_policy"


@pytest.fixture
def run(tmp_path):
    """Makes a run folder with checkpoints, `{name: (attempt, step)}`, in that order in time."""

    def make(checkpoints, name="run"):
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text("{}")
        for second, (checkpoint, (attempt, step)) in enumerate(checkpoints.items()):
            path = folder / "checkpoints" / checkpoint
            (path / "trainer").mkdir(parents=True)
            (path / "trainer" / "config.json").touch()
            (path / "state.json").write_text(json.dumps({"attempt": attempt, "step": step}))
            os.utime(path, (second, second))
        return folder

    return make


@pytest.mark.parametrize(
    ("checkpoints", "newest"),
    [
        ({"step-000010": (1, 10), "step-000005": (1, 5)}, "step-000010"),
        ({"step-1000000": (1, 10**6), "step-999999": (1, 999_999)}, "step-1000000"),
        ({"step-000010": (1, 10), "mine": (1, 12)}, "mine"),
        ({"step-000010": (1, 10), "mine": (1, 7)}, "step-000010"),
        ({"step-000005": (1, 5), "step-000010": (1, 10), "step-000007": (2, 7)}, "step-000007"),
        ({".step-000020": (1, 20), "step-000010": (1, 10)}, "step-000010"),
    ],
    ids=["by step", "by number", "a snapshot", "an older snapshot", "after a rewind", "a draft"],
)
def test_a_run_means_its_newest_checkpoint(run, checkpoints, newest):
    folder = run(checkpoints)
    assert checkpoint_of(str(folder)).name == newest
    assert find(str(folder)).location == str(folder / "checkpoints" / newest / "trainer")


def test_a_checkpoint_of_a_run_can_be_named(run):
    folder = run({"step-000010": (1, 10), "mine": (1, 3)})
    for name in ("step-000010", "mine"):
        found = find(f"{folder}@{name}").location
        assert found == str(folder / "checkpoints" / name / "trainer")


def test_a_checkpoint_that_a_run_lacks_is_answered_with_those_it_has(run):
    folder = run({"step-000010": (1, 10), "mine": (1, 3)})
    with pytest.raises(DataError, match="has no checkpoint step-000011; it has mine, step-000010"):
        find(f"{folder}@step-000011")
    with pytest.raises(DataError, match="has no checkpoint yet"):
        find(str(run({}, "empty")))


def test_a_pinned_name_means_the_same_from_anywhere_and_later_on(run, monkeypatch, tmp_path):
    folder = run({"step-000010": (1, 10)})
    monkeypatch.chdir(tmp_path)
    assert pinned("run") == f"{folder}@step-000010" == pinned("run@step-000010")
    assert pinned(str(folder / "checkpoints")) == str(folder / "checkpoints")
    assert pinned("checkpoints") == "checkpoints", "perhaps a model id"
    assert pinned(TINY) == TINY
    assert is_run(pinned("run"))


def test_adapters_lie_on_those_of_their_base(run, tmp_path):
    first, second = (run({"end": (1, 1)}, name) for name in ("first", "second"))
    for folder, base in ((first, TINY), (second, str(first))):
        text = json.dumps({"base_model_name_or_path": base})
        (folder / "checkpoints/end/trainer/adapter_config.json").write_text(text)
    found = find(str(second))
    assert found.location == find(TINY).location
    assert [path.split("/checkpoints")[0] for path in found.adapters] == [str(first), str(second)]


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"base_model_name_or_path": null}'])
def test_adapters_that_do_not_say_what_they_belong_to_are_refused(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(DataError, match="names no base_model_name_or_path"):
        find(str(tmp_path))


def test_what_is_wrong_with_a_model_is_told_by_the_key_that_names_it(tmp_path):
    problem = model_problem("critic.name_or_path", "/no/such/folder")
    assert problem == (
        "critic.name_or_path: /no/such/folder does not exist; name a folder or a model id"
    )
    file = tmp_path / "file"
    file.touch()
    assert "is a file" in model_problem("model.name_or_path", str(file))
    assert "holds no model" in model_problem("model.name_or_path", str(tmp_path))
    (tmp_path / "config.json").touch()
    for fine in (TINY, str(tmp_path), "somebody/model"):
        assert model_problem("model.name_or_path", fine) is None


def test_a_run_without_a_checkpoint_is_told_by_the_key_that_names_it(run):
    problem = model_problem("reward_model.name_or_path", str(run({})))
    assert problem.startswith("reward_model.name_or_path: ")
