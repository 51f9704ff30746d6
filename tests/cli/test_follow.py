import os
import signal

import pandas as pd
import pytest

from verl_lab.cli.follow import Interrupts, News, follow
from verl_lab.config.schema import LabConfig, ModelConfig


class Tape:
    """Stands in for a session: each look sees the next status and the record as it was then."""

    config = LabConfig(model=ModelConfig(name_or_path="none"))

    def __init__(self, *looks):
        self.looks = looks
        self.position = -1

    def status(self):
        self.position += 1
        step, _ = self.looks[self.position]
        return {
            "state": "training",
            "step": step,
            "steps_total": 9,
            "last": {"look": self.position},
        }

    @property
    def metrics(self):
        return pd.DataFrame(self.looks[self.position][1]).T

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
def notes():
    return Notes()


def shown(tape, notes, **kwargs):
    follow(tape, notes, is_over=tape.is_over, is_left=lambda: False, poll_s=0, **kwargs)
    return notes.shown


def test_every_step_is_shown_once_and_in_order(notes):
    one, two, three = ({"reward/mean": n / 10} for n in (1, 2, 3))
    tape = Tape((0, {}), (1, {1: one}), (1, {1: one}), (3, {1: one, 2: two, 3: three}))
    assert shown(tape, notes) == [(n, ["reward/mean"]) for n in (1, 2, 3)]


def test_an_evaluation_that_comes_after_its_step_is_shown_alone(notes):
    tape = Tape(
        (1, {1: {"reward/mean": 0.1}}),
        (1, {1: {"reward/mean": 0.1, "eval/accuracy": 0.5, "time/eval_s": 1.0}}),
    )
    assert shown(tape, notes) == [(1, ["reward/mean"]), (1, ["eval/accuracy", "time/eval_s"])]


def test_what_is_recorded_by_the_time_the_run_is_over_is_shown(notes):
    tape = Tape((0, {}), (2, {1: {"reward/mean": 0.1}, 2: {"reward/mean": 0.2}}))
    assert [step for step, _ in shown(tape, notes)] == [1, 2]


def test_steps_done_before_are_not_shown(notes):
    tape = Tape((2, {n: {"reward/mean": 0.1} for n in (1, 2, 3)}))
    assert shown(tape, notes, after_step=2) == [(3, ["reward/mean"])]


def test_steps_that_are_done_again_after_going_back_are_shown_again(notes):
    done = {n: {"reward/mean": 0.1} for n in (1, 2, 3)}
    tape = Tape((3, done), (1, {1: done[1]}), (2, {1: done[1], 2: done[2]}))
    assert [step for step, _ in shown(tape, notes)] == [1, 2, 3, 2]


def test_looking_ends_when_asked(notes):
    tape = Tape(*[(0, {})] * 5)
    follow(tape, notes, is_over=lambda: False, is_left=lambda: tape.position == 2, poll_s=0)
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
