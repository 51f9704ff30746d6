"""The train command as people use it: real processes, pipes, signals."""

import re
import signal
import time

import pandas as pd
import pytest

from verl_lab.cli.train import INTERRUPTED, heldout_line

TRAIN = ("train", "--config", "small.yaml")


def lines_until(process, pattern):
    """Reads output up to a line with `pattern`."""
    seen = []
    for line in process.stdout:
        seen.append(line.rstrip("\n"))
        if re.search(pattern, line):
            return seen
    raise AssertionError("\n".join([f"no line with {pattern}:", *seen, process.stderr.read()]))


def wait_until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_last_line_compares_the_first_and_the_last_evaluation():
    frame = pd.DataFrame(
        {"reward/mean": [None, 0.5, 0.6], "eval/accuracy": [0.3125, None, 0.777]}, index=[0, 1, 2]
    )
    assert heldout_line(frame) == "held-out accuracy: 0.31 -> 0.78"
    frame = frame.rename(columns={"eval/accuracy": "eval/reward"})
    assert heldout_line(frame) == "held-out reward: 0.31 -> 0.78"


def test_a_run_that_never_evaluated_says_so():
    assert heldout_line(pd.DataFrame({"reward/mean": [0.5]})).startswith(
        "held-out: never evaluated"
    )


def test_a_piped_run_prints_a_line_a_stage_and_the_result_last(verl_lab, run_folder):
    code, out, err = verl_lab(*TRAIN, "--name", "first")
    assert code == 0, err
    for step in (1, 2, 3, 4):
        for stage in ("Rollout", "Reward", "Train"):
            assert sum(line.startswith(f"[{stage}] step {step}/4: ") for line in out) == 1
    assert sum(line.startswith("[Eval]") for line in out) == 3
    assert re.fullmatch(r"held-out accuracy: \d\.\d\d -> \d\.\d\d", out[-1])
    assert run_folder().name == "first"


def test_a_resume_goes_on_to_more_steps_and_fails_where_nothing_is_left(verl_lab, run_folder):
    assert verl_lab(*TRAIN, "steps=2")[0] == 0
    code, out, err = verl_lab("train", "--resume", run_folder())
    assert code == 1
    assert "nothing left to do, 2 of 2 steps are done" in err
    assert "Traceback" not in err
    code, out, err = verl_lab("train", "--resume", run_folder(), "steps=3")
    assert code == 0, err
    assert [line.split(":")[0] for line in out if line.startswith("[Train]")] == [
        "[Train] step 3/3"
    ]


def test_one_interrupt_stops_after_the_step_and_saves(start, verl_lab, run_folder):
    process = start(*TRAIN, "steps=10000")
    lines_until(process, r"^\[Train\] step 1/")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, err
    assert "Stopping after this step" in out
    assert out.splitlines()[-1].startswith("held-out accuracy")
    assert list((run_folder() / "checkpoints").iterdir())
    assert verl_lab("ps")[1] == ["No session is live."]


def test_two_interrupts_stop_at_once(start, verl_lab):
    process = start(*TRAIN, "steps=10000", "trainer.train_batch_size=4096")
    lines_until(process, r"^Run folder")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    lines_until(process, "Stopping after this step")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == INTERRUPTED
    assert verl_lab("ps")[1] == ["No session is live."]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_run_goes_on_when_its_command_dies_and_can_be_followed_and_stopped(
    start, verl_lab, run_folder, number
):
    process = start(*TRAIN, "steps=10000")
    lines_until(process, r"^\[Train\] step 1/")
    process.send_signal(number)
    process.wait()
    head, row = verl_lab("ps")[1]
    shown = dict(zip(head.split("\t"), row.split("\t"), strict=True))
    assert shown["state"] == "training"
    assert shown["run"] == f"runs/{run_folder().name}"
    follower = start("attach", run_folder().name)
    lines_until(follower, r"^\[Train\] step \d+/10000")
    follower.send_signal(signal.SIGINT)
    assert "training at step" in follower.communicate(timeout=20)[0]
    code, out, err = verl_lab("stop", run_folder())
    assert code == 0, err
    assert out[-1] == f"Stopped. Go on with: verl-lab train --resume runs/{run_folder().name}"
    assert verl_lab("ps")[1] == ["No session is live."]


def test_a_failed_run_exits_with_1_and_shows_what_the_worker_said(verl_lab, folder):
    (folder / "bad.py").write_text("def score(prompt, response):\n    return float('nan')\n")
    code, _, err = verl_lab(*TRAIN, "reward.parts={bad.py:score: 1.0}")
    assert code == 1
    assert "NaN" in err or "nan" in err
    assert "Traceback" not in err


def test_runs_lists_what_is_on_disk(verl_lab):
    assert verl_lab("runs")[1] == ["No runs in runs."]
    verl_lab(*TRAIN, "steps=1", "--name", "one")
    head, row = verl_lab("runs")[1]
    shown = dict(zip(head.split("\t"), row.split("\t"), strict=True))
    assert shown["run"] == "one"
    assert shown["steps"] == "1"
    assert shown["is_live"] == "no"


def test_attaching_to_a_run_that_is_not_live_says_how_to_go_on(verl_lab):
    code, _, err = verl_lab("attach", "gone")
    assert code == 1
    assert "no live session" in err
