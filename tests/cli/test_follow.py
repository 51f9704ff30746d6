import os
import signal
import time

import pytest

from verl_lab.cli.follow import Interrupts, News, end_on_record, follow
from verl_lab.config.schema import LabConfig, ModelConfig
from verl_lab.errors import WorkerError
from verl_lab.store.database import Reader, Recorder
from verl_lab.store.folder import RunFolder


class Tape:
    """Stands in for a session: before each look something is recorded."""

    config = LabConfig(model=ModelConfig(name_or_path="none"))

    def __init__(self, path, *looks):
        self.folder = RunFolder.create(path, "run", "run")
        self.recorder = Recorder(self.folder)
        self.recorder.begin_attempt(0, "start")
        self.looks = looks
        self.position = -1
        self.step = 0

    def status(self):
        self.position += 1
        for step, metrics in self.looks[self.position]:
            if step < self.step:
                self.recorder.begin_attempt(step - 1, "rewind")
            self.recorder.step(step, metrics)
            self.step = step
        return {"state": "training", "step": self.step, "last": {"look": self.position}}

    def is_over(self):
        return self.position + 2 >= len(self.looks)


class Notes:
    """A view that writes down what it is told."""

    def __init__(self):
        self.shown = []

    def stand(self, status):
        pass

    def measured(self, step, metrics, *, num_samples):
        self.shown.append((step, sorted(metrics)))

    def remark(self, text):
        self.shown.append(text)


@pytest.fixture
def shown(tmp_path):
    """What a view is told of looks, each a list of `(step, metrics)` recorded before it."""

    def _shown(*looks, news=None):
        tape, notes = Tape(tmp_path, *looks), Notes()
        follow(tape, notes, is_over=tape.is_over, is_left=lambda: False, news=news, poll_s=0)
        return notes.shown

    return _shown


REWARD = {"reward/mean": 0.5}
EVAL = {"eval/accuracy": 0.5, "time/eval_s": 1.0}


def test_every_step_is_shown_once_and_in_order(shown):
    told = shown([], [(1, REWARD)], [], [(2, REWARD), (3, REWARD)], [])
    assert told == [(step, ["reward/mean"]) for step in (1, 2, 3)]


def test_an_evaluation_that_comes_after_its_step_is_shown_alone(shown):
    told = shown([(0, EVAL), (1, REWARD)], [(1, EVAL)], [(2, REWARD)], [])
    evaluation = ["eval/accuracy", "time/eval_s"]
    assert told == [
        (0, evaluation), (1, ["reward/mean"]), (1, evaluation), (2, ["reward/mean"]),
    ]  # fmt: skip


def test_what_is_recorded_by_the_time_the_run_is_over_is_shown(shown):
    assert [step for step, _ in shown([(1, REWARD), (2, REWARD)])] == [1, 2]


def test_steps_done_before_are_not_shown(shown):
    told = shown([(n, REWARD) for n in (1, 2, 3)], news=News(after_step=2))
    assert told == [(3, ["reward/mean"])]


def test_steps_that_are_done_again_after_going_back_are_shown_again(shown):
    told = shown([(n, REWARD) for n in (1, 2, 3)], [(2, REWARD)], [(3, REWARD)], [])
    assert [step for step, _ in told] == [1, 2, 3, 2, 3]


def test_events_that_a_person_should_know_are_shown_once(tmp_path):
    tape, notes = Tape(tmp_path, [], [], []), Notes()
    tape.recorder.event("reward_error", "reward part style:\nNameError: x", 1)
    tape.recorder.event("checkpoint", "step-000001", 1)
    follow(tape, notes, is_over=tape.is_over, is_left=lambda: False, poll_s=0)
    assert notes.shown == ["[Reward error] reward part style:\nNameError: x"]


def test_a_reward_that_fails_again_and_again_is_told_once(tmp_path):
    tape, notes = Tape(tmp_path, [], [], []), Notes()
    for step in (1, 2):
        tape.recorder.event("worker_died", "reward-0: died with signal 11 (SIGSEGV)", step)
        tape.recorder.event("reward_error", f"reward part style:\nKeyError: {step}", step)
        tape.recorder.event("recovery", "trainer-0: died with signal 9 (SIGKILL)", step)
    follow(tape, notes, is_over=tape.is_over, is_left=lambda: False, poll_s=0)
    recovery = "[Recovery] trainer-0: died with signal 9 (SIGKILL)"
    assert notes.shown == ["[Reward error] reward part style:\nKeyError: 1", recovery, recovery]


def test_the_record_tells_how_a_run_has_ended(tmp_path):
    tape = Tape(tmp_path)
    assert end_on_record(tape.folder) == ""
    tape.recorder.event("begin", "start", 0)
    tape.recorder.event("stopped", "after step 3", 3)
    assert end_on_record(tape.folder) == "stopped"
    tape.recorder.event("begin", "resume", 3)
    assert end_on_record(tape.folder) == ""
    tape.recorder.event("failed", "RewardError: gave nan", 4)
    with pytest.raises(WorkerError, match="gave nan"):
        end_on_record(tape.folder)


def test_events_of_earlier_days_are_not_shown(tmp_path):
    tape = Tape(tmp_path)
    tape.recorder.event("recovery", "long ago", 1)
    with Reader(tape.folder) as reader:
        assert News(since=time.time() + 60).remarks(reader) == []


def test_looking_ends_when_asked(tmp_path):
    tape = Tape(tmp_path, *[[]] * 5)
    follow(tape, Notes(), is_over=lambda: False, is_left=lambda: tape.position == 2, poll_s=0)
    assert tape.position == 2


def test_the_record_is_read_only_when_the_status_has_changed():
    news = News()
    status = {"step": 1, "last": {"reward/mean": 0.1}}
    assert news.may_have_come(status)
    assert not news.may_have_come(status)
    assert news.may_have_come({"step": 1, "last": {"eval/accuracy": 0.5}})


def test_interrupts_are_counted_and_raise_nothing():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.count == 2
    assert signal.getsignal(signal.SIGINT) is before
