"""Workers as real processes: calls, deadlines, deaths, replacement."""

import asyncio
import os
import signal
import time

import pytest

from verl_lab.batch.columns import Batch
from verl_lab.errors import DeadlineError, RewardError, WorkerError
from verl_lab.runtime.folder import start_ticks


async def echo(supervisor, device="cpu:0", greeting="hello", name="rollout-0"):
    return await supervisor.start(name, device, "echo:Echo", {"greeting": greeting})


def test_a_call_returns_what_the_service_returns(run_with_workers):
    async def scenario(supervisor):
        peer = await echo(supervisor)
        answer = await peer.call("say", "hi", deadline_s=10)
        assert answer == {"said": "hi", "greeting": "hello", "pid": peer.pid}
        assert peer.pid != os.getpid()

    run_with_workers(scenario)


def test_a_batch_of_any_size_arrives_as_it_was_sent(run_with_workers):
    async def scenario(supervisor):
        peer = await echo(supervisor)
        small = Batch.from_dict({"prompt": ["a", "b"], "response_ids": [[1, 2], [3]]})
        large = Batch.from_dict({"response_ids": [list(range(1000))] * 1000})
        for batch in (small, large):
            answer = await peer.call("say", batch, deadline_s=10)
            assert answer["said"].table.equals(batch.table)

    run_with_workers(scenario)


@pytest.mark.parametrize(("device", "cores"), [("cpu:0", [0]), ("cpu", None)])
def test_a_worker_is_pinned_to_its_cores_and_has_as_many_threads(run_with_workers, device, cores):
    async def scenario(supervisor):
        seen = await (await echo(supervisor, device)).call("cores", deadline_s=10)
        expected = cores or sorted(os.sched_getaffinity(0))
        assert seen == {"cores": expected, "threads": len(expected)}

    run_with_workers(scenario)


def test_a_death_fails_the_call_within_a_second_and_says_who_how_and_why(run_with_workers):
    async def scenario(supervisor):
        peer = await echo(supervisor)
        began = time.monotonic()
        with pytest.raises(
            WorkerError, match=r"rollout-0: died with exit code 7 during `die`"
        ) as e:
            await peer.call("die", 7, deadline_s=30)
        assert time.monotonic() - began < 1
        assert "last words" in e.value.log_tail

    run_with_workers(scenario)


def test_a_kill_is_named_by_its_signal(run_with_workers):
    async def scenario(supervisor):
        peer = await echo(supervisor)
        call = asyncio.create_task(peer.call("sleep", 30, deadline_s=60))
        await asyncio.sleep(0.1)
        os.kill(peer.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"signal 9 \(SIGKILL\) during `sleep`"):
            await asyncio.wait_for(call, 1)
        with pytest.raises(WorkerError, match="died"):
            await peer.call("say", 1, deadline_s=1)

    run_with_workers(scenario)


def test_a_call_to_a_worker_that_has_just_died_unnoticed_fails_too(run_with_workers):
    async def scenario(supervisor):
        peer = await echo(supervisor)
        os.kill(peer.pid, signal.SIGKILL)
        while start_ticks(peer.pid) is not None:  # without giving the event loop a turn
            time.sleep(0.01)
        time.sleep(0.2)
        assert peer.is_alive, "nobody has noticed yet"
        with pytest.raises(WorkerError, match=r"signal 9 \(SIGKILL\) during `say`"):
            await asyncio.wait_for(peer.call("say", 1, deadline_s=30), 2)

    run_with_workers(scenario)


def test_silence_beyond_the_deadline_is_an_error_and_the_late_answer_is_dropped(run_with_workers):
    async def scenario(supervisor):
        peer = await echo(supervisor)
        with pytest.raises(
            DeadlineError, match=r"rollout-0: gave no sign of life for 0.2 s during"
        ):
            await peer.call("sleep", 0.6, deadline_s=0.2)
        answer = await peer.call("say", "next", deadline_s=5)
        assert answer["said"] == "next"

    run_with_workers(scenario)


def test_progress_reports_are_signs_of_life(run_with_workers):
    async def scenario(supervisor):
        peer = await echo(supervisor)
        seen = []
        answer = await peer.call("sleep", 1.0, 5, deadline_s=0.5, on_report=seen.append)
        assert answer == "slept"
        assert seen == [{"row": i} for i in range(5)]

    run_with_workers(scenario)


def test_the_first_sign_of_life_may_take_longer_and_then_the_deadline_counts(run_with_workers):
    async def scenario(supervisor):
        peer = await echo(supervisor)
        slow_start = await peer.call("sleep", 0.6, deadline_s=0.2, grace_s=10)
        assert slow_start == "slept"
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=r"no sign of life for 0\.3 s"):
            await peer.call("report_and_sleep", 10, "call", deadline_s=0.3, grace_s=60)
        assert time.monotonic() - began < 5
        peer = await supervisor.restart("rollout-0")
        back = await peer.call("report_and_sleep", 0.6, "is_back", deadline_s=0.2, grace_s=10)
        assert back == "slept"

    run_with_workers(scenario)


def test_an_error_of_ours_is_raised_as_itself_with_the_workers_traceback(run_with_workers):
    async def scenario(supervisor):
        peer = await echo(supervisor)
        with pytest.raises(RewardError, match="sample 3 has no score") as e:
            await peer.call("fail_as_ours", deadline_s=10)
        assert "echo.py" in e.value.remote_traceback

    run_with_workers(scenario)


def test_any_other_error_names_the_worker_and_shows_the_traceback(run_with_workers):
    async def scenario(supervisor):
        peer = await echo(supervisor)
        with pytest.raises(WorkerError, match=r"(?s)rollout-0: raised KeyError.*echo\.py.*missing"):
            await peer.call("fail", deadline_s=10)
        assert peer.is_alive

    run_with_workers(scenario)


def test_a_service_that_does_not_start_says_why(run_with_workers):
    async def scenario(supervisor):
        with pytest.raises(WorkerError, match="will not start"):
            await echo(supervisor, greeting="refuse")

    run_with_workers(scenario)


def test_a_worker_can_be_a_fresh_interpreter_where_a_forked_one_would_not_do(run_with_workers):
    async def scenario(supervisor):
        supervisor.target = "verl_lab.runtime.worker:run_fresh"
        peer = await echo(supervisor)
        assert (await peer.call("say", "hi", deadline_s=10))["pid"] == peer.pid
        with pytest.raises(WorkerError, match="exit code 7"):
            await peer.call("die", 7, deadline_s=10)

    run_with_workers(scenario)


def test_a_restart_gives_a_new_process_and_ends_the_old_one(run_with_workers):
    async def scenario(supervisor):
        old = await echo(supervisor)
        new = await supervisor.restart("rollout-0")
        assert new.pid != old.pid
        assert start_ticks(old.pid) is None
        assert (await new.call("say", 1, deadline_s=10))["pid"] == new.pid
        assert supervisor.describe()[0]["num_restarts"] == 1

    run_with_workers(scenario)


def test_a_worker_leaves_when_its_lease_ends(run_with_workers):
    pids = []

    async def scenario(supervisor):
        pids.append((await echo(supervisor)).pid)
        supervisor.stop = lambda name: asyncio.sleep(0)  # nobody stops it: only the lease can

    run_with_workers(scenario)
    deadline = time.monotonic() + 5
    while start_ticks(pids[0]) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert start_ticks(pids[0]) is None
