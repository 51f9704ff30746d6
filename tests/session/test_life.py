"""What goes on and what ends, when processes of a session are killed or leave."""

import os
import signal
import time

import pytest

import verl_lab as lab
from verl_lab.errors import StateError, WorkerError
from verl_lab.session.registry import find

OPEN = """
import sys, time
import verl_lab as lab
s = lab.Session({path!r}, {overrides}, keep_alive_s={keep_alive_s})
s.start()
{then}
print(s.folder.path, flush=True)
time.sleep(300)
"""


def opened(config_file, then="", keep_alive_s=1, overrides="'steps=4'"):
    return OPEN.format(
        path=str(config_file), then=then, keep_alive_s=keep_alive_s, overrides=overrides
    )


def test_close_ends_every_process_and_frees_the_memory_and_may_be_called_twice(
    open_session, holdings
):
    session = open_session().start()
    held = holdings(session.status())
    session.close()
    session.close()
    assert held.left() == []
    assert session.status()["state"] == "closed"
    with pytest.raises(StateError, match="is closed"):
        session.evaluate()


def test_after_a_killed_kernel_a_run_goes_on_to_its_end_and_then_all_is_gone(
    kernel, config_file, holdings, wait_until
):
    first = kernel(opened(config_file, then="s.train()", overrides="'steps=12'"))
    name = first.line()
    with_second = lab.attach(name)
    held = holdings(with_second.status())
    with_second.detach()
    first.process.kill()
    assert held.are_gone_within(60)
    assert lab.runs(config_file.parent / "runs")["steps"].tolist() == [12]


def test_after_a_killed_kernel_an_idle_session_leaves_within_its_time(
    kernel, config_file, holdings
):
    first = kernel(opened(config_file, keep_alive_s=1))
    second = lab.attach(first.line())
    held = holdings(second.status())
    first.process.kill()
    time.sleep(1.5)
    assert len(held.left()) > 0, "a client is still attached"
    second.detach()
    assert held.are_gone_within(1 + 5)


def test_an_attached_client_sees_and_steers_the_same_run(kernel, config_file):
    first = kernel(opened(config_file, then="s.train()", overrides="'steps=500'"))
    session = lab.attach(first.line())
    assert session.status()["state"] == "training"
    assert session.status()["num_clients"] == 2
    session.call("stop")
    while session.status()["state"] != "idle":
        time.sleep(0.05)
    assert session.status()["runs"][0]["outcome"] == "stopped"
    session.close()


def test_a_killed_controller_takes_its_workers_and_memory_along(open_session, holdings):
    session = open_session().start()
    session.train(steps=500)
    held = holdings(session.status())
    os.kill(held.pids[0], signal.SIGKILL)
    assert held.are_gone_within(5)
    with pytest.raises(WorkerError, match=r"controller: .*--resume"):
        session.evaluate()


def test_a_killed_rollout_worker_is_replaced_and_the_run_goes_on(open_session, wait_until):
    session = open_session("steps=6").start()
    run = session.train()
    assert wait_until(lambda: session.status()["step"] >= 1, 30)
    victim = worker(session, "rollout-0")
    os.kill(victim["pid"], signal.SIGKILL)
    run.wait(60)
    assert session.status()["step"] == 6
    assert worker(session, "rollout-0")["num_restarts"] == 1
    assert session.metrics.index.tolist() == list(range(7))


def test_a_killed_trainer_is_restored_from_the_last_checkpoint_and_the_run_goes_on(
    open_session, wait_until
):
    session = open_session("steps=6").start()
    run = session.train()
    assert wait_until(lambda: session.status()["step"] >= 3, 30)
    os.kill(worker(session, "trainer-0")["pid"], signal.SIGKILL)
    run.wait(60)
    assert session.metrics.index.tolist() == list(range(7))
    assert worker(session, "trainer-0")["num_restarts"] == 1


def test_a_killed_reward_worker_changes_no_score(open_session, wait_until):
    session = open_session("steps=6").start()
    run = session.train()
    assert wait_until(lambda: session.status()["step"] >= 1, 30)
    os.kill(worker(session, "reward-0")["pid"], signal.SIGKILL)
    run.wait(60)
    assert session.metrics["reward/errors"].dropna().eq(0).all()
    assert worker(session, "reward-0")["num_restarts"] == 1


def test_a_reward_that_ends_its_own_process_on_every_row_fails_the_run_by_name(open_session):
    def crashes(response):
        import os

        os._exit(9)

    session = open_session(reward=crashes)
    with pytest.raises(WorkerError, match=r"reward part crashes scored row \d+"):
        session.train(steps=1).wait(60)


def test_an_interrupt_of_a_waiting_kernel_stops_the_waiting_and_not_the_run(
    kernel, config_file, wait_until
):
    then = """
print(s.folder.path, flush=True)
run = s.train()
try:
    run.wait()
except KeyboardInterrupt as stopped:
    print(type(stopped).__name__, run.status, flush=True)
"""
    first = kernel(opened(config_file, then=then, overrides="'steps=500'"))
    session = lab.attach(first.line())
    while session.status()["state"] != "training":
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(first.process.pid, signal.SIGINT)
    assert first.line() == "StoppedWaiting training"
    before = session.status()["step"]
    assert wait_until(lambda: session.status()["step"] > before, 30)
    session.close()


def test_a_new_session_of_the_same_notebook_replaces_an_abandoned_idle_one(
    kernel, config_file, open_session, holdings, wait_until, monkeypatch
):
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/a.ipynb")
    first = kernel(opened(config_file, keep_alive_s=300))
    name = first.line()
    session = lab.attach(name)
    held = holdings(session.status())
    session.detach()
    first.process.kill()
    assert wait_until(lambda: num_clients(name) == 1, 5)
    open_session().start()
    assert held.left() == []


def num_clients(name):
    info = find(name)
    session = lab.Session.attached(info)
    try:
        return session.status()["num_clients"]
    finally:
        session.detach()


def worker(session, name):
    return next(each for each in session.status()["workers"] if each["name"] == name)
