"""Kill everything, resume, and get the same run bit for bit."""

import os
import signal

import pytest
from safetensors.torch import load_file

import verl_lab as lab
from verl_lab.errors import DataError, StateError

TIMES = ("time/", "rollout/tokens_per_s", "memory/")
KNOBS = (
    "steps=6",
    "trainer.lr_schedule=linear",
    "trainer.warmup_steps=2",
    "algorithm.kl_coef=0.01",
)


def weights(session):
    return load_file(session.folder.checkpoints / "step-000006" / "trainer" / "model.safetensors")


def steady(session):
    """The metrics that must not differ: all but times."""
    frame = session.metrics
    return frame[[name for name in frame if not name.startswith(TIMES)]].loc[1:6]


@pytest.mark.parametrize("killed_after", [1, 3, 5])
def test_a_killed_run_ends_as_if_it_had_never_been_killed(open_session, wait_until, killed_after):
    straight = open_session(*KNOBS)
    straight.train().wait(60)

    killed = open_session(*KNOBS)
    killed.train()
    assert wait_until(lambda: killed.status()["step"] >= killed_after, 60)
    pid = killed.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not list(lab_sessions(pid)), 10)

    resumed = open_session(resume=killed.folder.path)
    resumed.train().wait(60)
    for name, tensor in weights(straight).items():
        assert tensor.equal(weights(resumed)[name]), name
    one, other = steady(straight), steady(resumed)
    columns = one.columns.intersection(other.columns)
    assert {"reward/mean", "policy/grad_norm", "policy/kl_ref", "policy/entropy"} <= {*columns}
    training = [name for name in columns if not name.startswith("eval/")]
    assert one[training].equals(other[training])
    for step in range(1, 7):
        assert straight.samples(step).table.equals(resumed.samples(step).table)


def test_a_resume_with_nothing_left_says_so_and_more_steps_go_on(open_session):
    first = open_session("steps=2")
    first.train().wait(60)
    first.close()
    second = open_session(resume=first.folder.path)
    with pytest.raises(StateError, match="nothing left to do, 2 of 2 steps are done"):
        second.train().wait(60)
    second.close()
    third = open_session("steps=3", resume=first.folder.path)
    third.train().wait(60)
    assert third.metrics.index.max() == 3


def test_a_run_that_is_live_cannot_be_resumed(open_session):
    session = open_session().start()
    with pytest.raises(StateError, match=r"a session works on it \(pid \d+\); attach to it"):
        lab.Session(resume=session.folder.path)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="is no run folder"):
        lab.Session(resume=tmp_path)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(open_session):
    session = open_session()
    session.train().wait(60)
    session.close()
    newest = session.folder.checkpoints / "step-000004" / "trainer" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-8])
    resumed = open_session(resume=session.folder.path).start()
    assert resumed.status()["step"] == 2
    resumed.train().wait(60)
    assert resumed.status()["step"] == 4


def test_changed_prompts_are_refused_on_a_resume(open_session):
    session = open_session()
    session.train(steps=2).wait(60)
    session.close()
    resumed = open_session("task.max_digits=3", resume=session.folder.path)
    with pytest.raises(DataError, match="the prompts have changed since this run was saved"):
        resumed.start()


def lab_sessions(pid):
    return (info for info in lab.ps() if info["pid"] == pid)
