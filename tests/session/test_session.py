"""What a user does with a session, on real processes."""

import asyncio
import threading
import time

import pytest

import verl_lab as lab
from verl_lab.errors import ConfigError, DeadlineError, RewardError, StateError


def test_training_in_the_background_records_every_step(open_session):
    session = open_session().start()
    began = time.perf_counter()
    run = session.train()
    assert time.perf_counter() - began < 0.1
    assert run.wait(60) is run
    assert run.status == "done"
    frame = run.metrics
    assert frame.index.tolist() == [0, 1, 2, 3, 4]
    assert frame["eval/accuracy"].notna().tolist() == [True, False, True, False, True]
    assert frame["weights/bytes"].dropna().nunique() == 1
    assert frame["policy/mismatch_kl"].dropna().max() < 1e-6
    assert frame.loc[0, "selftest/max_logprob_difference"] < 1e-4
    samples = run.samples(2)
    assert len(samples) == 16
    assert samples["weights_version"] == [1] * 16
    assert [len(v) for v in samples.groups().values()] == [4] * 4
    names = {path.name for path in session.folder.path.iterdir()}
    assert names >= {"config.yaml", "environment.json", "run.db", "samples", "checkpoints", "logs"}
    assert sorted(p.name for p in session.folder.checkpoints.iterdir()) == [
        "step-000002",
        "step-000004",
    ]
    assert "Session(" in repr(session)
    assert "trainer-0" in session._repr_html_()


def test_a_second_run_goes_on_where_the_first_ended_and_nothing_left_is_an_error(open_session):
    session = open_session()
    session.train(steps=3).wait(60)
    session.train().wait(60)
    assert session.status()["step"] == 4
    with pytest.raises(StateError, match="nothing left to do, 4 of 4 steps are done"):
        session.train().wait(60)


def test_a_run_can_be_awaited_paused_resumed_and_stopped(open_session, wait_until):
    session = open_session("steps=500")
    run = session.train()
    assert wait_until(lambda: session.status()["step"] >= 1, 60)
    run.pause()
    assert wait_until(lambda: run.status == "paused", 20)
    step = run.step
    time.sleep(0.5)
    assert run.step == step
    run.resume()
    assert wait_until(lambda: run.step > step, 20)
    with pytest.raises(DeadlineError, match=r"still training after 0\.2 s; it goes on"):
        run.wait(0.2)
    run.stop()

    async def awaited():
        return await run

    assert asyncio.run(awaited()).status == "stopped"
    assert (session.folder.checkpoints / f"step-{run.step:06d}").is_dir()


def test_a_step_by_hand_is_the_step_that_training_makes(open_session):
    by_hand, trained = open_session(), open_session()
    batch = by_hand.advantages(by_hand.score(by_hand.rollout()))
    assert set(batch["reward/task"]) <= {0.0, 1.0}
    batch = by_hand.update(batch)
    assert by_hand.sync_weights() == 1
    trained.train(steps=1).wait(60)
    assert by_hand.samples(1)["response_ids"] == trained.samples(1)["response_ids"]
    columns = ["reward/mean", "policy/entropy", "policy/grad_norm"]
    one, other = by_hand.metrics.loc[1, columns], trained.metrics.loc[1, columns]
    assert one.tolist() == other.tolist()


def test_a_batch_can_be_filtered_between_stages(open_session):
    session = open_session()
    batch = session.score(session.rollout(session.prompts(4)))
    kept = [min(scores) != max(scores) for scores in _by_group(batch) for _ in range(4)]
    batch = session.advantages(batch.filter(kept) if any(kept) else batch)
    updated = session.update(batch)
    assert len(updated) == len(batch)


def test_stepping_by_hand_is_refused_while_a_run_is_under_way(open_session, wait_until):
    session = open_session("steps=500")
    run = session.train()
    assert wait_until(lambda: run.status == "training", 60)
    with pytest.raises(StateError, match=r"(rollout|prompts): a run is under way"):
        session.rollout()
    with pytest.raises(StateError, match="train: a run is under way"):
        session.train().wait(20)
    run.stop()


def test_a_knob_takes_effect_at_the_next_step_and_is_written_down(open_session, wait_until):
    session = open_session("steps=500")
    run = session.train()
    assert wait_until(lambda: session.status()["step"] >= 1, 60)
    first = session.set("trainer.learning_rate", 5e-5)
    assert wait_until(lambda: session.status()["step"] >= first, 30)
    run.stop()
    run.wait(30)
    rates = session.metrics["policy/learning_rate"].dropna()
    assert rates.iloc[0] == 1e-4
    assert rates.loc[first] == 5e-5
    with _reader(session) as reader:
        row = reader.interventions().iloc[0]
    assert (row["key"], row["old"], row["new"]) == ("trainer.learning_rate", "0.0001", "5e-05")
    with pytest.raises(ConfigError, match="seed: is fixed"):
        session.set("seed", 3)
    with pytest.raises(ConfigError, match="Input should be greater than 0"):
        session.set("rollout.temperature", -1)


@pytest.mark.parametrize(
    "changes",
    [
        ["rollout.rollout_batch_size=3"],
        ["rollout.num_rollout_workers=2"],
        ["trainer.micro_batch_tokens=40"],
    ],
)
def test_speed_knobs_change_no_sample(open_session, changes):
    plain, changed = open_session(), open_session(*changes)
    for session in (plain, changed):
        session.train(steps=2).wait(60)
    for step in (1, 2):
        one, other = plain.samples(step), changed.samples(step)
        assert one["response_ids"] == other["response_ids"]


def test_a_reward_function_of_the_notebook_scores_and_can_be_replaced(open_session):
    bonus = 0.25

    def right(response, answer):
        return float(response == answer) + bonus

    session = open_session(reward=right)
    batch = session.score(session.rollout())
    assert set(batch["reward"]) <= {0.25, 1.25}
    assert batch["reward"] == batch["reward/right"]

    @lab.reward
    async def length(responses):
        return [float(len(r)) for r in responses]

    session.set_reward({"length": (length, -1.0), "task": 2.0})
    batch = session.score(batch)
    expected = [
        2 * t - n for t, n in zip(batch["reward/task"], batch["reward/length"], strict=True)
    ]
    assert batch["reward"] == expected


def test_a_reward_that_hangs_costs_its_sample_the_fallback_and_is_counted(open_session):
    def slow(response, sample_id):
        import time

        time.sleep(60 if sample_id == 2 else 0)
        return 1.0

    session = open_session("reward.timeout_s=0.5", "reward.fallback=-3", reward=slow)
    batch = session.score(session.rollout(session.prompts(1)))
    assert batch["reward"] == [1, 1, -3, 1]
    assert session.status()["state"] == "idle"
    with _reader(session) as reader:
        events = reader.events()
    text = events[events["kind"] == "reward_error"]["text"].iloc[0]
    assert "in slow" in text, "where it hung"


def test_a_reward_that_raises_is_counted_and_its_traceback_is_in_the_records(open_session):
    def fragile(response, sample_id):
        return [1.0][sample_id]

    session = open_session(reward=fragile)
    session.train(steps=1).wait(60)
    assert session.metrics.loc[1, "reward/errors"] == 12
    with _reader(session) as reader:
        events = reader.events()
    text = events[events["kind"] == "reward_error"]["text"].iloc[0]
    assert "return [1.0][sample_id]" in text
    assert "IndexError" in text


def test_a_score_that_is_no_number_fails_the_run_and_a_mended_reward_goes_on(open_session):
    session = open_session(reward=lambda response, sample_id: None if sample_id == 3 else 1.0)
    with pytest.raises(RewardError, match=r"gave None to the sample .*sample_id 3"):
        session.train().wait(60)
    assert session.status()["state"] == "idle"
    session.set_reward(lambda response: float(len(response)))
    session.train().wait(60)
    assert session.metrics.index.tolist() == [0, 1, 2, 3, 4]


def test_a_column_that_the_data_lacks_is_named_before_anything_is_trained(open_session):
    session = open_session(reward=lambda response, solution: 0.0)
    with pytest.raises(RewardError, match="needs the column 'solution'; the data has"):
        session.start()
    other = open_session()
    with pytest.raises(RewardError, match="needs the column 'solution'"):
        other.set_reward(lambda response, solution: 0.0)
    assert "reward/task" in other.score(other.rollout()), "the old reward is still there"


def test_rewinding_gives_the_same_steps_again_and_a_changed_knob_gives_others(open_session):
    session = open_session("steps=6")
    session.train(steps=2).wait(60)
    assert session.snapshot("two") == "two"
    session.train(steps=2).wait(60)
    first = [session.samples(step) for step in (3, 4)]
    first_metrics = session.metrics.loc[[3, 4], "policy/grad_norm"].tolist()
    assert session.rewind("two") == 2
    assert session.status()["step"] == 2
    assert session.metrics.index.max() == 2
    session.train(steps=2).wait(60)
    for step, before in zip((3, 4), first, strict=True):
        assert session.samples(step).table.equals(before.table)
    assert session.metrics.loc[[3, 4], "policy/grad_norm"].tolist() == first_metrics
    session.rewind("two")
    session.set("rollout.temperature", 0.7)
    session.train(steps=1).wait(60)
    assert not session.samples(3).table.equals(first[0].table)
    with pytest.raises(StateError, match=r"there is no three; there are .*two"):
        session.rewind("three")
    with pytest.raises(StateError, match="one named two already"):
        session.snapshot("two")


def test_evaluating_twice_gives_the_same_figures_and_changes_nothing(open_session):
    session = open_session()
    one, other = session.evaluate(), session.evaluate()
    assert one == other
    assert 0 <= one["eval/accuracy"] <= 1


def test_a_kl_term_starts_at_zero_and_grows(open_session):
    session = open_session("algorithm.kl_coef=0.1", "trainer.learning_rate=1e-3", "steps=3")
    session.train().wait(60)
    kl = session.metrics["policy/kl_ref"].dropna()
    assert kl.iloc[0] == pytest.approx(0, abs=1e-6)
    assert kl.iloc[2] > 1e-5
    assert session.metrics.loc[0, "selftest/max_kl_ref"] < 1e-4


def test_a_session_that_cannot_start_says_why_at_once_or_when_asked(open_session, tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.temprature: no such key; did you mean"):
        open_session("rollout.temprature=1")
    with pytest.raises(ConfigError, match=r"task\.max_digit: .* did you mean task\.max_digits"):
        open_session("task.max_digit=1")
    with pytest.raises(ConfigError, match=r"cpu:900 does not exist here"):
        open_session("trainer.device_map=cpu:900")
    nothing = tmp_path / "nothing"
    with pytest.raises(ConfigError, match=r"model\.name_or_path: .*nothing does not exist"):
        open_session(f"model.name_or_path={nothing}")
    nothing.mkdir()
    (nothing / "config.json").write_text("{}")  # no model after all
    session = open_session(f"model.name_or_path={nothing}")
    with pytest.raises(lab.DataError, match=r"model\.name_or_path: .*nothing cannot be loaded"):
        session.start()
    assert session.status()["state"] == "closed"


def test_status_answers_other_threads_while_a_stage_runs(open_session):
    def slow(responses):
        import time

        time.sleep(1.0)
        return [0.0] * len(responses)

    session = open_session(reward=slow).start()
    batch = session.rollout()
    thread = threading.Thread(target=session.score, args=(batch,))
    thread.start()
    time.sleep(0.3)
    began = time.perf_counter()
    stage = session.status()["stage"]
    assert time.perf_counter() - began < 0.5
    thread.join()
    assert stage == "reward"


def test_a_context_manager_closes_the_session(open_session, holdings):
    with open_session() as session:
        held = holdings(session.start().status())
    assert held.left() == []


def _by_group(batch):
    rewards = batch["reward"]
    return [[rewards[row] for row in rows] for rows in batch.groups().values()]


def _reader(session):
    from verl_lab.store.database import Reader

    return Reader(session.folder)
