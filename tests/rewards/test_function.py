import subprocess
import sys
import threading

import numpy as np
import pytest

from verl_lab.errors import RewardError
from verl_lab.rewards.compose import combine
from verl_lab.rewards.function import RewardFunction, from_reference, reward

LOCK = threading.Lock()


def test_how_a_function_is_called_is_read_off_its_parameters():
    @reward
    def single(prompt, response, answer, level=1, **columns):
        return 0.0

    @reward
    async def batched(responses, answer):
        return []

    assert (single.style, single.own, single.is_async) == ("single", ("prompt", "response"), False)
    assert (single.columns, single.optional, single.takes_all) == (("answer",), ("level",), True)
    assert (batched.style, batched.own, batched.is_async) == ("batched", ("responses",), True)
    assert "def single" in single.source


def test_a_reward_function_can_still_be_called():
    @reward(name="length")
    def score(response):
        return len(response)

    assert score.name == "length"
    assert score(response="abc") == 3


@pytest.mark.parametrize(
    "function",
    [
        lambda prompt: 0,
        lambda prompts, response: 0,
        lambda response, *more: 0,
        lambda text: 0,
    ],
)
def test_parameters_that_cannot_be_served_are_refused_when_defined(function):
    with pytest.raises(RewardError, match=r"reward reward: (takes|cannot be called)"):
        reward(function)


def test_what_cannot_travel_is_named_when_defined():
    def locked(response):
        with LOCK:
            return 0.0

    with pytest.raises(RewardError, match=r"reward locked: cannot travel .*`LOCK`, a lock"):
        reward(locked)


def test_closures_and_lambdas_travel_by_value():
    bonus = {"yes": 2.0}
    function = reward(lambda response: bonus.get(response, 0.0))
    back = RewardFunction.loads(function.dumps())
    bonus["yes"] = 99
    assert back(response="yes") == 2.0


def test_a_users_own_module_travels_with_its_function(tmp_path, monkeypatch):
    (tmp_path / "my_scores.py").write_text(
        "FACTOR = 3\ndef score(response):\n    return FACTOR * len(response)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_scores

    data = reward(my_scores.score).dumps()
    code = (
        "import sys; from verl_lab.rewards.function import RewardFunction; "
        "print(RewardFunction.loads(sys.stdin.buffer.read())(response='ab'))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, check=True, cwd="/"
    )
    assert out.stdout.strip() == b"6"


def test_columns_are_checked_and_chosen_by_name():
    function = reward(lambda response, answer, level=0: 0)
    with pytest.raises(RewardError, match=r"needs the column 'answer'; the data has prompt, x"):
        function.check_columns(["prompt", "x"])
    assert function.arguments(["prompt", "answer", "other"]) == ["answer"]
    takes_all = reward(lambda response, **columns: 0)
    assert takes_all.arguments(["prompt", "response", "a", "b"]) == ["a", "b"]


def test_a_reference_names_a_file_or_a_module(tmp_path):
    file = tmp_path / "scores.py"
    file.write_text("def short(response):\n    return -len(response)\n")
    assert from_reference(f"{file}:short")(response="abc") == -3
    with pytest.raises(RewardError, match=r"has no function long; it has short"):
        from_reference(f"{file}:long")
    with pytest.raises(RewardError, match="cannot be imported"):
        from_reference("no_such_module:f")


def test_parts_add_up_by_weight():
    parts = {"a": np.array([1.0, 2.0]), "b": np.array([10.0, 0.0])}
    assert combine(parts, {"a": 2.0, "b": -0.5}).tolist() == [-3.0, 4.0]
