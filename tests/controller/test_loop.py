"""The order of things, with a recorder in place of the lab: the expected order is the
documentation."""

import asyncio

import pytest

from verl_lab.config.functions import _registered
from verl_lab.config.load import load_config
from verl_lab.controller.loop import synchronous
from verl_lab.controller.recipes import recipe_of

MODEL = {"model": {"name_or_path": "m"}, "task": {"name": "add_compare"}}


class Recorder:
    """Stands in for the lab and its steps at once, and writes down what it is asked."""

    def __init__(self, stop_before=None, recipe="grpo", num_pairs=1, **algorithm):
        self.calls, self.step, self.stop_before = [], 0, stop_before
        self.config = load_config({**MODEL, "recipe": recipe, "algorithm": algorithm})
        self._num_pairs = num_pairs

    async def may_go_on(self):
        return self.stop_before is None or self.step + 1 < self.stop_before

    async def before_step(self):
        self.calls.append("knobs")

    def next_prompts(self):
        return f"prompts {self.step + 1}"

    async def run_recipe(self, prompts):
        return await recipe_of(self.config)(self, prompts)

    async def finish_step(self, batch):
        self.step += 1
        self.calls.append(f"record {batch}")

    async def rollout(self, prompts):
        self.calls.append(f"rollout {prompts}")
        return "batch"

    async def score(self, batch):
        self.calls.append("score")
        return batch

    async def reference_logprobs(self, batch):
        self.calls.append("reference")
        return batch

    async def resample(self, batch):
        self.calls.append("resample")
        return batch

    async def greedy_rewards(self, batch):
        self.calls.append("greedy")
        return batch

    async def values(self, batch):
        self.calls.append("values")
        return batch

    def pairs(self, batch):
        self.calls.append("pairs")
        return ["pair"] * self._num_pairs

    def advantages(self, batch):
        self.calls.append("advantages")
        return batch

    async def update(self, batch):
        self.calls.append("update")
        return batch

    async def sync_weights(self):
        self.calls.append("sync")
        return self.step


def steps(lab, until):
    asyncio.run(synchronous(lab, until=until))
    return lab.calls


def test_each_step_samples_scores_trains_publishes_and_is_recorded():
    one = ["score", "advantages", "update", "sync", "record batch"]
    assert steps(Recorder(), until=2) == [
        "knobs", "rollout prompts 1", *one,
        "knobs", "rollout prompts 2", *one,
    ]  # fmt: skip


def test_the_reference_is_asked_only_where_there_is_a_kl_term():
    assert "reference" not in steps(Recorder(), until=1)
    calls = steps(Recorder(kl_coef=0.1), until=1)
    assert calls.index("reference") == calls.index("score") + 1


def test_a_stop_ends_before_the_next_step_begins():
    lab = Recorder(stop_before=3)
    assert steps(lab, until=100).count("record batch") == 2


def test_a_run_that_has_its_steps_does_nothing():
    lab = Recorder()
    lab.step = 5
    assert steps(lab, until=5) == []


def test_an_error_in_a_stage_leaves_the_step_unrecorded():
    class Broken(Recorder):
        async def update(self, batch):
            raise RuntimeError("no")

    lab = Broken()
    with pytest.raises(RuntimeError, match="no"):
        steps(lab, until=1)
    assert lab.step == 0
    assert "record batch" not in lab.calls


ROLLOUT = ["rollout prompts 1", "score"]
AFTER = ["advantages", "update", "sync"]


@pytest.mark.parametrize(
    ("recipe", "knobs", "order"),
    [
        ("grpo", {}, [*ROLLOUT, *AFTER]),
        ("grpo", {"kl_coef": 0.1}, [*ROLLOUT, "reference", *AFTER]),
        ("ppo", {}, [*ROLLOUT, "values", *AFTER]),
        ("ppo", {"kl_coef": 0.1}, [*ROLLOUT, "reference", "values", *AFTER]),
        ("remax", {}, [*ROLLOUT, "greedy", *AFTER]),
        ("dapo", {}, [*ROLLOUT, "resample", *AFTER]),
        ("online_dpo", {}, [*ROLLOUT, "pairs", "reference", "update", "sync"]),
        ("dpo", {}, ["reference", "update"]),
        ("kto", {}, ["reference", "update"]),
        ("sft", {}, ["update"]),
        ("reward_model", {}, ["update"]),
    ],
)
def test_a_recipe_runs_the_stages_that_its_knobs_ask_for(recipe, knobs, order):
    calls = steps(Recorder(recipe=recipe, **knobs), until=1)
    assert [c for c in calls if c != "knobs" and not c.startswith("record")] == order


def test_without_a_pair_that_differs_nothing_is_trained():
    calls = steps(Recorder(recipe="online_dpo", num_pairs=0), until=1)
    assert "update" not in calls
    assert "sync" in calls


def test_a_recipe_of_the_users_own_takes_the_place_of_the_built_in_ones():
    async def mine(lab, prompts):
        return await lab.score(await lab.rollout(prompts))

    _registered["recipe"]["mine"] = mine
    try:
        assert "update" not in steps(Recorder(recipe="mine"), until=1)
    finally:
        del _registered["recipe"]["mine"]
