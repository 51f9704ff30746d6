import json

import pytest

from verl_lab.config.schema import TaskConfig
from verl_lab.data.arithmetic import AddCompare, is_heldout
from verl_lab.data.entries import decode
from verl_lab.data.tasks import make_task
from verl_lab.errors import ConfigError


def test_problems_are_right_distinct_and_fixed_by_the_seed():
    task = AddCompare()
    problems = task.problems("train", 300, seed=3)
    assert problems == task.problems("train", 300, seed=3)
    assert problems != task.problems("train", 300, seed=4)
    assert len({row["prompt"] for row in problems}) == 300
    for row in problems:
        body, answer = row["prompt"][:-1], row["answer"]
        if "+" in body:
            a, b = map(int, body.split("+"))
            assert int(answer) == a + b
        else:
            a, b = map(int, body.split("?"))
            assert answer == ("<" if a < b else ">" if a > b else "=")


def test_held_out_problems_are_so_for_every_seed():
    task = AddCompare()
    for seed in (0, 1):
        assert not any(is_heldout(row["prompt"]) for row in task.problems("train", 200, seed))
        assert all(is_heldout(row["prompt"]) for row in task.problems("heldout", 50, seed))


@pytest.mark.parametrize(
    ("response", "score"), [("95", 1), (" 95 ", 1), ("9", 0), ("95.", 0), ("", 0), ("095", 0)]
)
def test_only_the_exact_answer_scores(response, score):
    assert AddCompare().score(response, {"answer": "95"}) == score


def test_options_shape_the_problems_and_are_checked():
    task = make_task(TaskConfig(name="add_compare", max_digits=3, compare_share=1.0))
    problems = task.problems("train", 50, 0)
    assert all("?" in row["prompt"] for row in problems)
    assert max(len(row["prompt"]) for row in problems) == 8
    with pytest.raises(ConfigError, match=r"task\.max_digit: .* did you mean task\.max_digits\?"):
        make_task(TaskConfig(name="add_compare", max_digit=3))
    with pytest.raises(ConfigError, match=r"task\.max_digits: is 0; use 1 to 9"):
        make_task(TaskConfig(name="add_compare", max_digits=0))


def test_reasoning_gym_brings_its_problems_and_its_own_verifier():
    task = make_task(TaskConfig(name="basic_arithmetic", max_terms=2, max_digits=1, size=30))
    train, heldout = task.problems("train", 30, 0), task.problems("heldout", 10, 0)
    assert train == task.problems("train", 30, 0)
    assert train[:10] != heldout
    row = train[0]
    assert task.score(row["answer"], row) == 1
    assert task.score(f"I think <answer>{row['answer']}</answer>.", row) == 1
    assert 0 < task.score(f"It is {row['answer']}", row) < 1
    assert task.score("no idea", row) == 0


def test_an_unknown_task_or_option_is_refused_with_what_was_meant():
    with pytest.raises(ConfigError, match=r"task\.name: .* did you mean basic_arithmetic\?"):
        make_task(TaskConfig(name="basic_aritmetic"))
    with pytest.raises(ConfigError, match=r"task\.max_term: .* did you mean task\.max_terms\?"):
        make_task(TaskConfig(name="basic_arithmetic", max_term=2))
    with pytest.raises(ConfigError, match="reasoning-gym refuses"):
        make_task(TaskConfig(name="basic_arithmetic", min_terms=5, max_terms=2))


def test_seeds_and_splits_of_reasoning_gym_share_almost_no_problem():
    task = make_task(TaskConfig(name="basic_arithmetic", size=200))

    def prompts(split, seed):
        return {row["prompt"] for row in task.problems(split, 200, seed)}

    first = prompts("train", 0)
    for other in (prompts("train", 1), prompts("heldout", 0), prompts("heldout", 1)):
        assert len(first & other) < 10


# The package that arc_agi comes from leaves its data file open.
@pytest.mark.filterwarnings("ignore:unclosed file .*arcagi:ResourceWarning")
@pytest.mark.parametrize("name", ["graph_color", "arc_agi"])
def test_a_verifier_gets_the_very_entry_that_made_the_problem(name):
    task = make_task(TaskConfig(name=name, size=1))
    row = task.problems("train", 1, 0)[0]
    entry = decode(row["task_entry"])
    if name == "graph_color":  # has many answers, and names none
        assert row["answer"] is None
        answer = json.dumps(entry["metadata"]["possible_answer"])
        assert all(isinstance(vertex, int) for vertex in entry["metadata"]["possible_answer"])
    else:
        answer = row["answer"]
    assert task.score(answer, row) == 1


def test_tasks_without_a_check_of_their_options_work_too():
    task = make_task(TaskConfig(name="power_function", size=2))
    row = task.problems("train", 2, 0)[0]
    assert task.score(row["answer"], row) == 1


@pytest.mark.parametrize("size", [0, -1, "many"])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ConfigError, match=rf"task\.size: is {size!r}; give a whole number"):
        make_task(TaskConfig(name="basic_arithmetic", size=size))
