import numpy as np
import pytest
import torch

from verl_lab.batch.columns import Batch
from verl_lab.config.load import load_config
from verl_lab.engines.reward import RewardService
from verl_lab.errors import ConfigError, RewardError
from verl_lab.rewards.function import reward


@pytest.fixture
def batch():
    return Batch.from_dict(
        {
            "group_id": [5, 5, 6],
            "sample_id": [0, 1, 0],
            "prompt": ["1+1=", "1+1=", "2+2="],
            "response": ["2", "3", "4"],
            "answer": ["2", "2", "4"],
        }
    )


@pytest.fixture
def service():
    def make(*functions, report=lambda progress: None, **sections):
        config = load_config({"model": {"name_or_path": "m"}, **sections})
        made = {f.name: f.dumps() for f in map(reward, functions)}
        return RewardService(config.model_dump(mode="json"), made, 0, "cpu", report)

    return make


def test_a_function_of_one_response_gets_its_columns_and_reports_each_row(service, batch):
    def right(prompt, response, answer):
        return float(response == answer)

    rows = []
    scored, stats = service(right, report=rows.append).score(batch, "right")
    assert scored["reward/right"] == [1, 0, 1]
    assert stats == {"errors": 0, "traceback": ""}
    assert rows == [{"row": 0}, {"row": 1}, {"row": 2}, {"is_back": True}]


def test_batched_and_async_functions_score_alike(service, batch):
    def batched(prompts, responses, answer):
        return [float(r == a) for r, a in zip(responses, answer, strict=True)]

    async def batched_async(responses, answer):
        return batched(None, responses, answer)

    async def single_async(response, answer):
        return float(response == answer)

    made = service(batched, batched_async, single_async)
    for name in ("batched", "batched_async", "single_async"):
        assert made.score(batch, name)[0][f"reward/{name}"] == [1, 0, 1]


def test_an_exception_costs_one_sample_its_score_and_shows_the_users_line(service, batch):
    def fragile(response):
        return 1 / (int(response) - 3)

    made = service(fragile, reward={"fallback": -7.0})
    scored, stats = made.score(batch, "fragile")
    assert scored["reward/fragile"] == [-1, -7, 1]
    assert stats["errors"] == 1
    assert "return 1 / (int(response) - 3)" in stats["traceback"]


def test_an_exception_in_a_batched_function_costs_all_of_its_samples(service, batch):
    def broken(responses):
        raise KeyError("x")

    scored, stats = service(broken, reward={"fallback": 0.5}).score(batch, "broken")
    assert scored["reward/broken"] == [0.5] * 3
    assert stats["errors"] == 3


@pytest.mark.parametrize("bad", [None, float("nan"), float("-inf"), "high", np.ones(2), [1.0]])
def test_what_is_no_number_stops_with_the_samples_name(service, batch, bad):
    def odd(response):
        return bad if response == "3" else 1.0

    with pytest.raises(RewardError, match=r"row 1 \(group_id 5, sample_id 1\); return a finite"):
        service(odd).score(batch, "odd")


def test_too_few_scores_are_refused(service, batch):
    def two(responses):
        return [1.0, 2.0]

    def one(responses):
        return 1.0

    with pytest.raises(RewardError, match="returned 2 scores for 3 responses"):
        service(two).score(batch, "two")
    with pytest.raises(RewardError, match=r"returned 1\.0 for 3 responses; return a list"):
        service(one).score(batch, "one")


def test_scores_may_be_numbers_of_numpy_and_torch(service, batch):
    def arrays(responses):
        return torch.tensor([0.5, 1.0, 2.0])

    def scalars(response):
        return np.float32(len(response))

    made = service(arrays, scalars)
    assert made.score(batch, "arrays")[0]["reward/arrays"] == [0.5, 1, 2]
    assert made.score(batch, "scalars")[0]["reward/scalars"] == [1, 1, 1]


def test_a_function_may_not_take_the_name_of_the_labs_own_part(service):
    def task(response):
        return 0.0

    with pytest.raises(ConfigError, match=r"`task` names a part of the lab's own"):
        service(task, task={"name": "add_compare"})


def test_the_tasks_verifier_is_a_part(service, batch):
    made = service(task={"name": "add_compare"})
    assert made.score(batch, "task")[0]["reward/task"] == [1, 0, 1]


def test_a_part_can_name_a_file(service, batch, tmp_path):
    file = tmp_path / "scores.py"
    file.write_text("def short(response):\n    return -len(response)\n")
    part = f"{file}:short"
    made = service(reward={"parts": {part: 1.0}})
    assert made.score(batch, part)[0][f"reward/{part}"] == [-1, -1, -1]


def test_an_unknown_part_names_those_there_are(service, batch):
    with pytest.raises(ConfigError, match="no part speed; there are task"):
        service(task={"name": "add_compare"}).score(batch, "speed")


def test_the_traceback_of_a_function_begins_with_its_own_lines(service, batch):
    def broken(response):
        return 1 / 0

    _, stats = service(broken).score(batch, "broken")
    lines = stats["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "in broken" in lines[1]
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_the_traceback_of_an_async_function_shows_nothing_of_what_runs_it(service, batch):
    async def broken(responses):
        return 1 / 0

    async def broken_one(response):
        return 1 / 0

    made = service(broken, broken_one)
    for name in ("broken", "broken_one"):
        lines = made.score(batch, name)[1]["traceback"].splitlines()
        assert f"in {name}" in lines[1]


def test_a_tasks_own_error_keeps_the_frames_it_has(service, batch):
    made = service(task={"name": "add_compare"})
    _, stats = made.score(batch.without(["answer"]), "task")
    assert stats["errors"] == 3
    assert 'File "' in stats["traceback"]
