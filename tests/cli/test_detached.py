"""Runs that go on without the command that began them."""

import re
import signal

import pytest

TRAIN = ("train", "--config", "small.yaml", "--name", "first")


@pytest.fixture
def cells():
    """The only row of a piped table, by column."""

    def by_column(table):
        head, row = table
        return dict(zip(head.split("\t"), row.split("\t"), strict=True))

    return by_column


def test_a_run_whose_command_is_killed_goes_on_to_its_end_leaves_and_can_be_resumed(
    start, lines_until, verl_lab, cells, sessions, wait_until
):
    assert verl_lab("runs")[1] == ["No runs in runs."]
    process = start(*TRAIN, "steps=30", "keep_alive_s=1")
    assert lines_until(process, r"^\[Eval\] step 0/30")[0] == "Run folder: runs/first"
    process.kill()
    assert sessions.live()
    assert wait_until(lambda: not sessions.left(), 40)
    listed = cells(verl_lab("runs")[1])
    assert [listed[name] for name in ("run", "steps", "is_live")] == ["first", "30", "no"]

    code, _, err = verl_lab("train", "--resume", "runs/first")
    assert code == 1
    assert "nothing left to do, 30 of 30 steps are done" in err
    assert "verl-lab train --resume runs/first steps=60" in err
    assert "Traceback" not in err

    code, out, err = verl_lab("train", "--resume", "runs/first", "steps=32")
    assert code == 0, err
    heads = [line.split(":")[0] for line in out if line.startswith("[")]
    assert heads == [
        f"[{stage}] step {step}/32" for step in (31, 32) for stage in ("Rollout", "Reward", "Train")
    ] + ["[Eval] step 32/32"]
    assert re.fullmatch(r"held-out accuracy: \d\.\d\d -> \d\.\d\d", out[-1])
    assert not sessions.left()


def test_a_run_whose_terminal_is_gone_can_be_followed_and_stopped(
    start, lines_until, verl_lab, cells, sessions
):
    process = start(*TRAIN, "steps=10000")
    lines_until(process, r"^\[Train\] step 1/")
    process.send_signal(signal.SIGHUP)
    process.wait()

    shown = cells(verl_lab("ps")[1])
    assert shown["run"] == "runs/first"
    assert shown["state"] == "training"
    assert shown["clients"] == "0"
    assert shown["ends"] == "5 s after its run"

    visitor, follower = start("attach", "first"), start("attach", "runs/first")
    for each in (visitor, follower):
        lines_until(each, r"^\[Train\] step \d+/10000")
    visitor.send_signal(signal.SIGINT)
    assert re.search(r"^first: training, \d+ steps done", visitor.communicate(timeout=20)[0], re.M)

    code, out, err = verl_lab("stop", "first")
    assert code == 0, err
    assert out[-1] == "Stopped. Go on with: verl-lab train --resume runs/first"
    assert "first: stopped" in follower.communicate(timeout=20)[0]
    assert follower.returncode == 0
    assert not sessions.left()


@pytest.mark.parametrize("command", ["attach", "stop"])
def test_a_run_that_is_not_live_is_named_with_what_to_do(verl_lab, command):
    code, _, err = verl_lab(command, "gone")
    assert code == 1
    assert "gone: no live session works on it" in err
    assert "verl-lab train --resume" in err
