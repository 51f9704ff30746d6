import functools
import subprocess
import sys
import threading

import cloudpickle
import numpy as np
import pytest

from verl_lab.errors import RewardError
from verl_lab.rewards.compose import combine
from verl_lab.rewards.function import RewardFunction, from_reference, reward

LOCK = threading.Lock()


def elsewhere(function):
    """What a function scores in a process that has none of the user's modules."""
    code = (
        "import sys; from verl_lab.rewards.function import RewardFunction; "
        "print(RewardFunction.loads(sys.stdin.buffer.read())(response='ab'))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], input=function.dumps(), capture_output=True, cwd="/"
    )
    assert out.returncode == 0, out.stderr.decode()
    return out.stdout.decode().strip()


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

    assert elsewhere(reward(my_scores.score)) == "6"


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


def test_modules_beside_a_users_module_travel_too(tmp_path, monkeypatch):
    (tmp_path / "my_numbers.py").write_text("FACTOR = 5\ndef double(x):\n    return 2 * x\n")
    (tmp_path / "my_uses.py").write_text(
        "import my_numbers\nfrom my_numbers import double\n"
        "def score(response):\n    return my_numbers.FACTOR + double(len(response))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_uses

    assert elsewhere(reward(my_uses.score)) == "9"
    assert elsewhere(reward(functools.partial(my_uses.score))) == "9"


def test_a_cell_may_use_a_module_of_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "my_lengths.py").write_text("def length(text):\n    return len(text)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import my_lengths

    scope = {"my_lengths": my_lengths, "__name__": "__main__"}
    exec("def score(response):\n    return my_lengths.length(response)", scope)
    assert elsewhere(reward(scope["score"])) == "2"


def test_pickling_registers_no_module_for_good_and_keeps_what_was(tmp_path, monkeypatch):
    for name in ("my_fresh", "my_known"):
        (tmp_path / f"{name}.py").write_text("def score(response):\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_fresh
    import my_known

    cloudpickle.register_pickle_by_value(my_known)
    try:
        reward(my_fresh.score)
        registered = cloudpickle.list_registry_pickle_by_value()
        assert "my_fresh" not in registered
        assert "my_known" in registered
    finally:
        cloudpickle.unregister_pickle_by_value(my_known)


class Bonus:
    def __init__(self, bonus):
        self.bonus = bonus

    def score(self, response):
        return self.bonus

    def __call__(self, response):
        return 2 * self.bonus


class Patient:
    async def __call__(self, response):
        return 1.0


def test_methods_and_objects_are_rewards_too():
    assert RewardFunction.loads(reward(Bonus(3).score).dumps())(response="") == 3
    assert RewardFunction.loads(reward(Bonus(3)).dumps())(response="") == 6
    assert reward(Patient()).is_async


def test_what_an_object_holds_and_cannot_travel_is_named():
    with pytest.raises(RewardError, match=r"because of `bonus`, a lock"):
        reward(Bonus(threading.Lock()))


def test_what_is_no_function_is_refused():
    with pytest.raises(RewardError, match=r"is 5, whose parameters cannot be read"):
        reward(5)


def test_a_file_with_a_mistake_is_refused_by_name(tmp_path):
    (tmp_path / "wrong.py").write_text("def f(response:\n")
    with pytest.raises(RewardError, match=r"wrong\.py cannot be imported .*never closed"):
        from_reference(f"{tmp_path / 'wrong.py'}:f")
