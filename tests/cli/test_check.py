from verl_lab.cli.check import plan
from verl_lab.config.schema import (
    CheckpointConfig,
    EvalConfig,
    LabConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainerConfig,
)


def facts(**sections):
    config = LabConfig(
        model=ModelConfig(name_or_path="some/model"),
        task=TaskConfig(name="add_compare"),
        **{"rollout": RolloutConfig(device_map="cpu"), **sections},
    )
    return dict(plan(config))


def test_sizes_are_shown_with_what_they_are_made_of():
    found = facts(
        rollout=RolloutConfig(
            num_rollout_workers=2, rollout_batch_size=33, group_size=8, device_map="cpu"
        ),
        trainer=TrainerConfig(train_batch_size=1024, updates_per_step=4),
    )
    assert found["samples a step"] == "1,024 = 128 prompts x 8 responses"
    assert found["updates a step"] == "4, of 256 samples"
    assert found["sequences in flight"] == "33: 17 on each of 2 rollout workers"


def test_every_worker_is_shown_with_its_device():
    found = facts(rollout=RolloutConfig(num_rollout_workers=2, device_map="cpu:0"))
    assert found["rollout-0"] == found["rollout-1"] == "on cpu:0"
    assert "trainer-0" in found
    assert "reward-0" in found


def test_the_task_is_the_reward_where_no_parts_are_named():
    assert facts()["reward"] == "1 x task"
    parts = {"task": 1.0, "style.py:short": 0.25}
    assert facts(reward=RewardConfig(parts=parts))["reward"] == "1 x task + 0.25 x style.py:short"


def test_when_it_evaluates_and_saves_is_said_in_words():
    found = facts(eval=EvalConfig(every_steps=0), checkpoint=CheckpointConfig(every_steps=0))
    assert found["evaluation"] == "never"
    assert found["checkpoints"] == "at the end"
    found = facts(eval=EvalConfig(every_steps=1), checkpoint=CheckpointConfig(every_steps=5))
    assert found["evaluation"] == (
        "at the start, every step and at the end, on 128 held-out prompts"
    )
    assert found["checkpoints"] == "every 5 steps and at the end; the newest 3 are kept"


def test_checking_starts_nothing_and_makes_no_run_folder(verl_lab, folder):
    code, out, _ = verl_lab("check", "--config", "small.yaml", "rollout.group_size=8")
    assert code == 0
    assert any("16 = 2 prompts x 8 responses" in line for line in out)
    assert not (folder / "runs").exists()
    assert verl_lab("ps")[1] == ["No session is live."]
