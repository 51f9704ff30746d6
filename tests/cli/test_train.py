"""The train command as people use it: real processes, pipes, signals."""

import re
import signal

import pandas as pd

from verl_lab.cli.exits import INTERRUPTED
from verl_lab.cli.train import heldout_line

TRAIN = ("train", "--config", "small.yaml", "--name", "first")
LONG = (*TRAIN, "steps=10000")


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


def test_one_interrupt_stops_after_the_step_and_saves(
    start, lines_until, verl_lab, folder, sessions
):
    process = start(*LONG)
    lines_until(process, r"^\[Train\] step 1/")
    assert sessions.live()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, err
    assert "Stopping after this step" in out
    assert out.splitlines()[-1].startswith("held-out accuracy")
    done = re.search(r"^(\d+) of 10000 steps done", out, re.MULTILINE)[1]
    assert (folder / "runs/first/checkpoints" / f"step-{int(done):06d}").is_dir()
    assert verl_lab("ps")[1] == ["No session is live."]
    assert not sessions.left()


def test_two_interrupts_stop_at_once_and_leave_nothing(start, lines_until, verl_lab, sessions):
    process = start(*LONG, "trainer.train_batch_size=4096")
    lines_until(process, r"^\[Eval\] step 0/")
    assert sessions.live()
    process.send_signal(signal.SIGINT)
    lines_until(process, "Stopping after this step")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == INTERRUPTED, err
    assert "0 of 10000 steps done" in out
    assert verl_lab("ps")[1] == ["No session is live."]
    assert not sessions.left()


def test_an_interrupt_while_processes_start_leaves_nothing_at_all(
    start, folder, sessions, wait_until
):
    process = start(*TRAIN)
    assert wait_until(sessions.live, 20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == INTERRUPTED, err
    assert out == "Stopped before training began.\n"
    assert "Traceback" not in err
    assert not list((folder / "runs").iterdir())
    assert not sessions.left()


def test_a_failed_run_exits_with_1_and_shows_why(verl_lab, folder, sessions):
    (folder / "bad.py").write_text("def score(prompt, response):\n    return float('nan')\n")
    code, _, err = verl_lab(*TRAIN, "reward.parts={bad.py:score: 1.0}")
    assert code == 1
    assert "bad.py:score: gave nan to the sample at row 0" in err
    assert "Traceback" not in err
    assert not sessions.left()


def test_input_that_turns_out_wrong_in_a_worker_exits_with_2_and_leaves_no_run(
    verl_lab, folder, sessions
):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")  # no model after all
    code, _, err = verl_lab(*TRAIN, "model.name_or_path=./model")
    assert code == 2
    assert "model.name_or_path: ./model cannot be loaded" in err
    assert "Traceback" not in err
    assert not list((folder / "runs").iterdir())
    assert not sessions.left()
