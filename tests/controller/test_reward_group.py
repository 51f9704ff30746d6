"""What a dead or hung scoring worker costs, with a real service behind peers that fail on cue."""

import asyncio

import pytest

from verl_lab.batch.columns import Batch
from verl_lab.config.load import load_config
from verl_lab.controller.groups import MAX_RETRIES
from verl_lab.controller.reward_group import RewardGroup, RewardModelGroup
from verl_lab.engines.reward import RewardService
from verl_lab.errors import DeadlineError, RewardError, WorkerError
from verl_lab.rewards.function import reward

CONFIG = load_config({"model": {"name_or_path": "m"}, "reward": {"fallback": -5.0}})
BATCH = Batch.from_dict({"prompt": ["p"] * 6, "response": list("abcdef")})


class Peer:
    """A worker in this process: a row's response ends it, hangs it, or is scored.

    `deadly` says how often each response still ends a worker.
    """

    device, log = "cpu", None

    def __init__(self, name, service, deadly, hanging):
        self.name, self.is_alive = name, True
        self._service, self._deadly, self._hanging = service, deadly, hanging

    async def call(self, method, batch, *args, deadline_s, grace_s=0.0, on_report=None):
        assert method == "score"

        def report(progress):
            on_report(progress)
            if "row" in progress:
                self._fail(batch["response"][progress["row"]])

        return self._service(report).score(batch, *args)

    def _fail(self, response):
        if self._deadly.get(response, 0):
            self._deadly[response] -= 1
            self.is_alive = False
            raise WorkerError(self.name, "died with SIGSEGV during `score`", "the log")
        if response in self._hanging:
            raise DeadlineError(f"{self.name}: gave no sign of life")


class Supervisor:
    """Hands out peers, and counts how many it replaced."""

    def __init__(self, names, service, deadly=None, hanging=()):
        deadly = deadly or {}  # shared by all that come, so its counts run down
        self._make = lambda name: Peer(name, service, deadly, hanging)
        self.peers = {name: self._make(name) for name in names}
        self.num_restarts = 0

    async def restart(self, name):
        self.num_restarts += 1
        self.peers[name] = self._make(name)
        return self.peers[name]


def code_of(report):
    """The service that scores a response by its letter's number."""
    functions = {"code": reward(lambda response: ord(response) - ord("a")).dumps()}
    return RewardService(CONFIG.model_dump(mode="json"), functions, 0, "cpu", report)


class Model:
    """Stands in for a reward model; like it, reports rows that are done."""

    def __init__(self, report):
        self._report = report

    def score(self, batch):
        for row in range(len(batch)):
            self._report({"row": row})
        scores = [float(ord(response)) for response in batch["response"]]
        return batch.with_columns({"reward/reward_model": scores})


def score(group, part, seen=None):
    return asyncio.run(
        group.score(
            BATCH,
            part,
            CONFIG,
            progress=lambda done, total: None if seen is None else seen.append((done, total)),
            span=lambda *_: None,
        )
    )


@pytest.fixture
def functions():
    def make(workers=1, **failures):
        names = [f"reward-{i}" for i in range(workers)]
        supervisor = Supervisor(names, code_of, **failures)
        return RewardGroup(["cpu"] * workers, supervisor), supervisor

    return make


@pytest.fixture
def model():
    def make(service=Model, **failures):
        supervisor = Supervisor(["reward_model-0"], service, **failures)
        return RewardModelGroup(["cpu"], supervisor), supervisor

    return make


def test_scores_of_several_workers_are_in_the_order_of_the_rows(functions):
    scores, counts = score(functions(workers=4)[0], "code")
    assert scores.tolist() == [0, 1, 2, 3, 4, 5]
    assert (counts.errors, counts.timeouts, counts.traceback) == (0, 0, "")


def test_a_row_whose_worker_dies_once_is_scored_after_all(functions):
    group, supervisor = functions(deadly={"c": 1})
    scores, counts = score(group, "code")
    assert scores.tolist() == [0, 1, 2, 3, 4, 5]
    assert (counts.errors, supervisor.num_restarts) == (0, 1)


def test_a_row_that_kills_its_worker_twice_is_set_aside_with_the_fallback(functions):
    group, supervisor = functions(deadly={"c": 99})
    scores, counts = score(group, "code")
    assert scores.tolist() == [0, 1, -5, 3, 4, 5]
    assert (counts.errors, supervisor.num_restarts) == (1, 2)
    assert "died with SIGSEGV" in counts.traceback


@pytest.mark.parametrize("workers", [1, 3])
def test_the_third_death_in_one_call_is_an_error_that_names_part_and_row(functions, workers):
    group, supervisor = functions(workers, deadly={"b": 99, "c": 99})
    said = r"SIGSEGV during `score` while reward part code scored row [12], death 3 .* by hand"
    with pytest.raises(WorkerError, match=said) as caught:
        score(group, "code")
    assert caught.value.log_tail == "the log"
    assert all(peer.is_alive for peer in supervisor.peers.values())


def test_deaths_of_one_call_are_not_held_against_the_next(functions):
    group, _ = functions(deadly={"c": 99})
    for _ in range(2):
        assert score(group, "code")[1].errors == 1


def test_a_row_that_hangs_costs_its_score_at_once_and_counts_as_late(functions):
    group, supervisor = functions(hanging=["a", "b", "c", "d"])
    scores, counts = score(group, "code")
    assert scores.tolist() == [-5, -5, -5, -5, 4, 5]
    assert (counts.timeouts, counts.errors, supervisor.num_restarts) == (4, 0, 4)


def test_a_model_that_dies_scores_in_a_worker_of_its_name_again(model):
    group, supervisor = model(deadly={"d": MAX_RETRIES})
    seen = []
    scores, counts = score(group, "reward_model", seen)
    assert scores.tolist() == [97, 98, 99, 100, 101, 102]
    assert (counts.errors, supervisor.num_restarts) == (0, MAX_RETRIES)
    assert seen[-1] == (5, 6)
    assert group.names == ["reward_model-0"]


def test_a_model_that_dies_each_time_is_an_error(model):
    group, supervisor = model(deadly={"d": 99})
    with pytest.raises(WorkerError, match="reward_model-0: died with SIGSEGV"):
        score(group, "reward_model")
    assert supervisor.num_restarts == MAX_RETRIES


def test_a_model_that_hangs_is_replaced(model):
    group, supervisor = model(hanging=["a"])
    with pytest.raises(DeadlineError):
        score(group, "reward_model")
    assert supervisor.num_restarts == MAX_RETRIES


def test_an_error_of_the_model_itself_is_raised_and_not_tried_again(model):
    class Broken(Model):
        def score(self, batch):
            raise RewardError("reward reward_model: no")

    group, supervisor = model(Broken)
    with pytest.raises(RewardError, match="reward reward_model: no"):
        score(group, "reward_model")
    assert supervisor.num_restarts == 0
