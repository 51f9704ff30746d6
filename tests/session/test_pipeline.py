"""Sampling ahead of training, on real processes."""

import os
import signal

import pytest

AHEAD = (
    "steps=8", "pipeline.max_staleness=1", "rollout.device_map=cpu:0", "trainer.device_map=cpu:1",
)  # fmt: skip

pytestmark = pytest.mark.skipif(os.cpu_count() < 2, reason="two cores take turns on one")


def drawn(session, steps):
    return [group for step in steps for group in session.samples(step).groups()]


def test_every_prompt_is_trained_on_once_and_no_sample_is_too_old(open_session):
    session = open_session(*AHEAD)
    session.train().wait(100)
    metrics = session.metrics.loc[1:]
    assert metrics.index.tolist() == list(range(1, 9))
    assert metrics["rollout/staleness"].between(0, 1).all()
    assert metrics["rollout/staleness"].max() == 1
    assert drawn(session, range(1, 9)) == list(range(8 * 4))
    assert metrics["policy/correction_ess"].gt(0).all()
    for step in range(1, 9):
        versions = set(session.samples(step)["weights_version"])
        assert len(versions) == 1
        assert step - 2 <= versions.pop() <= step - 1
    assert session.metrics["eval/accuracy"].notna().sum() == 5


def test_what_was_sampled_ahead_of_a_stop_is_drawn_again(open_session):
    first = open_session(*AHEAD)
    first.train(steps=3).wait(60)
    first.train(steps=2).wait(60)
    first.close()
    resumed = open_session(resume=first.folder.path)
    resumed.train().wait(60)
    assert drawn(resumed, range(1, 9)) == list(range(8 * 4))


@pytest.mark.parametrize("victim", ["rollout-0", "trainer-0", "reward-0"])
def test_a_killed_worker_costs_no_prompt_and_counts_none_twice(open_session, wait_until, victim):
    session = open_session(*AHEAD, "steps=10", "checkpoint.every_steps=2").start()
    run = session.train()
    assert wait_until(lambda: session.status()["step"] >= 3, 30)
    (worker,) = (w for w in session.status()["workers"] if w["name"] == victim)
    os.kill(worker["pid"], signal.SIGKILL)
    run.wait(100)
    assert drawn(session, range(1, 11)) == list(range(10 * 4))
    assert session.metrics.loc[1:, "rollout/staleness"].between(0, 1).all()
