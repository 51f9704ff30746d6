import pytest

from verl_lab.cli import progress
from verl_lab.cli.progress import (
    HEARTBEAT_S,
    Lines,
    LiveLine,
    duration,
    heldout_score,
    stage_lines,
    state_text,
    tokens_per_s,
)

STEP = {
    "rollout/response_tokens": 7.5,
    "time/rollout_s": 0.84,
    "reward/mean": 0.4125,
    "reward/std": 0.5,
    "reward/timeouts": 0.0,
    "time/reward_s": 0.06,
    "loss/policy": -0.01234,
    "policy/entropy": 1.5,
    "time/train_s": 1.1,
}
STATUS = {
    "state": "training",
    "step": 2,
    "steps_total": 60,
    "stage": "rollout",
    "stage_done": 120,
    "stage_total": 256,
    "eta_s": 83.0,
}


def test_each_stage_has_a_line_with_its_sizes_and_its_time():
    assert stage_lines(STEP, "step 3/60", num_samples=256) == [
        "[Rollout] step 3/60: 256 samples, 1,920 tokens, 0.8 s",
        "[Reward] step 3/60: mean 0.412, std 0.500, 0.1 s",
        "[Train] step 3/60: loss -0.0123, entropy 1.5000, 1.1 s",
    ]


def test_an_evaluation_has_a_line_of_its_own():
    lines = stage_lines({"eval/accuracy": 0.3125, "eval/reward": 0.5}, "step 10/60", num_samples=8)
    assert lines == ["[Eval] step 10/60: held-out accuracy 0.312"]


def test_timeouts_and_errors_of_the_reward_are_counted_where_there_were_any():
    step = {"reward/mean": 0.0, "reward/timeouts": 2.0, "reward/errors": 1.0}
    assert stage_lines(step, "step 1/2", num_samples=8) == [
        "[Reward] step 1/2: mean 0.000, 2 timeouts, 1 errors"
    ]


def test_the_self_test_before_the_first_step_gets_no_line():
    assert stage_lines({"selftest/max_logprob_difference": 1e-6}, "step 0/2", num_samples=8) == []


def test_accuracy_is_the_score_where_there_is_one():
    assert heldout_score({"eval/accuracy": 0.25, "eval/reward": 0.5}) == ("accuracy", 0.25)
    assert heldout_score({"eval/reward": 0.5}) == ("reward", 0.5)
    assert heldout_score({"reward/mean": 0.5}) is None


def test_speed_counts_the_tokens_over_all_stages_of_the_step():
    assert tokens_per_s(STEP, num_samples=256) == pytest.approx(1920 / 2.0)
    assert tokens_per_s({"rollout/response_tokens": 7.5}, num_samples=256) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")]
)
def test_durations_are_written_as_on_a_clock(seconds, text):
    assert duration(seconds) == text


def test_a_long_stage_shows_in_a_pipe_how_far_it_is_but_not_at_every_look(capsys):
    times = iter([0.0, 1.0, HEARTBEAT_S, HEARTBEAT_S, HEARTBEAT_S + 1])
    lines = Lines(clock=lambda: next(times))
    for _ in range(3):
        lines.stand(STATUS)
    assert capsys.readouterr().out.splitlines() == ["[Rollout] step 3/60: rollout 120/256"]


def test_text_in_square_brackets_is_printed_as_it_is(capsys):
    Lines().remark("[red]not a colour[/red] :smile:")
    assert capsys.readouterr().out == "[red]not a colour[/red] :smile:\n"


def test_a_session_that_is_idle_after_a_run_shows_how_it_ended():
    assert state_text({"state": "idle", "runs": []}) == "idle"
    runs = [{"outcome": "stopped"}, {"outcome": None}]
    assert state_text({"state": "training", "runs": runs}) == "training"
    assert state_text({"state": "idle", "runs": runs[:1]}) == "stopped"


def test_the_live_line_shows_reward_speed_and_time_left():
    console = progress.Console(width=160, force_terminal=True, record=True)
    with console.capture() as shown, LiveLine(console) as view:
        view.stand({"state": "starting", "step": 0})
        view.measured(2, STEP, num_samples=256)
        view.stand(STATUS)
    text = shown.get()
    for part in ("training", "2/60", "reward 0.412", "960 tokens/s", "1:23 left", "120/256"):
        assert part in text
