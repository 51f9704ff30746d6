"""Every recipe on real processes, by its shipped config; and what they share with each other."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import verl_lab as lab
from verl_lab.config import functions
from verl_lab.config.presets import PRESETS

CONFIGS = Path(__file__).parents[2] / "configs"
ALGORITHMS = sorted({*PRESETS, "lora"})
QUICK = (
    "steps=3", "trainer.train_batch_size=32", "rollout.rollout_batch_size=32", "task.size=64",
    "data.heldout_size=16", "eval.every_steps=3", "eval.num_prompts=16",
    "checkpoint.every_steps=0", "rollout.device_map=cpu:0", "trainer.device_map=cpu:0",
)  # fmt: skip


@pytest.fixture
def open_algorithm(open_session, tmp_path):
    def make(name, *overrides, resume=None):
        if resume is not None:
            return open_session(resume=resume)
        folder = f"runs_dir={tmp_path / 'runs'}"
        return open_session(*QUICK, folder, *overrides, config=CONFIGS / f"{name}.yaml")

    return make


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_shipped_config_trains_and_is_evaluated(open_algorithm, name):
    session = open_algorithm(name)
    session.train().wait(100)
    metrics = session.metrics
    losses = metrics.filter(like="loss/").dropna(how="all")
    assert len(losses) == 3
    assert np.isfinite(losses.stack()).all()
    norms = metrics.filter(like="grad_norm").dropna(how="all")
    assert (norms.max(axis=1) > 0).any()
    assert metrics.filter(like="eval/").notna().any(axis=1).tolist()[::3] == [True, True]
    assert len(session.samples(3)) > 0


def test_ppo_can_be_stepped_through_and_edited_between_stages(open_algorithm):
    session = open_algorithm("ppo", "critic.warmup_steps=0")
    batch = session.score(session.rollout(session.prompts(8)))
    batch = session.values(session.reference_logprobs(batch))
    batch = session.advantages(batch)
    for name in ("ref_logprobs", "values", "advantages", "returns"):
        assert [len(row) for row in batch[name]] == [len(row) for row in batch["response_ids"]]
    returns, values = np.concatenate(batch["returns"]), np.concatenate(batch["values"])
    assert not np.allclose(returns, values)
    doubled = [[2 * value for value in row] for row in batch["advantages"]]
    session.update(batch.with_columns({"advantages": doubled}))
    assert session.sync_weights() == 1
    assert session.status()["step"] == 1
    assert session.metrics.loc[1, "critic/grad_norm"] > 0


def test_an_update_ends_a_step_made_by_hand_where_nothing_is_sampled(open_algorithm):
    session = open_algorithm("sft")
    samples = session.prompts()
    assert {"response_ids", "response_mask"} <= set(samples.names)
    session.update(samples)
    assert session.status()["step"] == 1
    assert len(session.samples(1)) == 32


def test_functions_of_the_users_own_take_the_place_of_the_built_in_ones(open_algorithm, tmp_path):
    seen = tmp_path / "seen"

    @lab.advantage
    def above_half(samples, *, threshold=0.5):
        return samples.rewards - threshold

    @lab.policy_loss
    def plain(logprobs, old_logprobs, advantages, loss_mask, weights, *, num_tokens, sample_index):
        masked = logprobs.where(loss_mask, 0.0)
        return -(weights * masked * advantages).sum(), {"seen": loss_mask.sum() / num_tokens}

    @lab.recipe
    async def twice(stages, prompts):
        seen.write_text("called")
        batch = await stages.score(await stages.rollout(prompts))
        batch = stages.advantages(batch)
        await stages.update(batch)
        batch = await stages.update(batch)
        await stages.sync_weights()
        return batch

    try:
        session = open_algorithm(
            "grpo",
            "recipe=twice",
            "algorithm.advantage=above_half",
            "algorithm.advantage_options={threshold: 0.25}",
            "algorithm.scale=none",
            "algorithm.policy_loss=plain",
        )
        session.train(steps=1).wait(60)
        samples = session.samples(1)
        found = [row[0] for row in samples["advantages"]]
        assert found == pytest.approx([r - 0.25 for r in samples["reward"]])
        assert session.metrics.loc[1, "policy/seen"] == pytest.approx(1)
        assert seen.read_text() == "called"

        @lab.policy_loss
        def later(logprobs, *rest, num_tokens, sample_index):
            return (0.0 * logprobs).sum()

        session.set("algorithm.policy_loss", "later")
        session.train(steps=1).wait(60)
        assert session.metrics.loc[2, "loss/policy"] == 0
    finally:
        for kind, name in (
            ("advantage", "above_half"), ("policy_loss", "plain"), ("policy_loss", "later"),
            ("recipe", "twice"),
        ):  # fmt: skip
            functions._registered[kind].pop(name, None)


def test_an_option_that_nothing_has_is_refused_before_it_costs_a_step(open_algorithm):
    session = open_algorithm("cispo").start()
    with pytest.raises(lab.ConfigError, match="no option 'delta'; it has ratio_min, ratio_max"):
        session.set("algorithm.loss_options", {"delta": 0.1})
    session.train(steps=1).wait(60)
    with pytest.raises(lab.ConfigError, match=r"advantage_options: .*no option 'gama'"):
        open_algorithm("reinforce", "algorithm.advantage_options={gama: 0.9}").start()


def test_a_reward_model_is_used_by_the_name_of_its_run(open_algorithm):
    trained = open_algorithm("reward_model", "name=rm")
    trained.train().wait(60)
    trained.close()
    session = open_algorithm("grpo", f"reward_model.name_or_path={trained.folder.path}")
    workers = {worker["role"]: worker for worker in session.start().status()["workers"]}
    assert workers["reward_model"]["device"] == workers["rollout"]["device"]
    assert workers["reward_model"]["rss_bytes"] > 0
    session.train(steps=1).wait(60)
    scores = session.samples(1)
    whole = AutoModelForSequenceClassification.from_pretrained(
        trained.export(trained.folder.path.parent / "exported")
    )
    for prompt, response, found in zip(
        scores["prompt_ids"], scores["response_ids"], scores["reward/reward_model"], strict=True
    ):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            hidden = whole.base_model(ids).last_hidden_state[0, -1]
            assert whole.score(hidden).item() == pytest.approx(found, abs=1e-4)


def test_adapters_alone_are_trained_sent_and_saved_and_merge_into_what_they_mean(
    open_algorithm, tmp_path
):
    session = open_algorithm("lora", "algorithm.kl_coef=0.1", "trainer.learning_rate=1e-2")
    session.train().wait(60)
    metrics = session.metrics
    assert metrics["policy/mismatch_kl"].dropna().max() < 1e-6
    assert metrics["policy/kl_ref"].dropna().iloc[0] == pytest.approx(0, abs=1e-7)
    assert metrics["policy/kl_ref"].dropna().iloc[-1] > 0
    whole = sum(
        tensor.numel() * 4
        for tensor in AutoModelForCausalLM.from_pretrained("verl_lab/models/tiny_policy")
        .state_dict()
        .values()
    )
    assert metrics["weights/bytes"].dropna().iloc[-1] < whole / 2
    merged = AutoModelForCausalLM.from_pretrained(session.export(tmp_path / "merged"))
    samples = session.rollout(session.prompts(2))
    for prompt, response, logprobs in zip(
        samples["prompt_ids"], samples["response_ids"], samples["rollout_logprobs"], strict=True
    ):
        with torch.no_grad():
            logits = merged(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]
        assert found.tolist() == pytest.approx(logprobs, abs=1e-4)
    session.close()
    goes_on = open_algorithm("grpo", f"model.name_or_path={session.folder.path}")
    assert goes_on.evaluate()["eval/accuracy"] == metrics["eval/accuracy"].dropna().iloc[-1]


@pytest.mark.parametrize("name", ["ppo", "lora", "dpo"])
def test_a_resumed_run_goes_on_bit_for_bit(open_algorithm, name):
    knobs = ["steps=4", "algorithm.kl_coef=0.05", "algorithm.kl_target=0.01"]
    straight = open_algorithm(name, *knobs)
    straight.train().wait(100)
    first = open_algorithm(name, *knobs)
    first.train(steps=2).wait(60)
    first.close()
    resumed = open_algorithm(name, resume=first.folder.path)
    resumed.train().wait(60)
    one, other = straight.metrics, resumed.metrics
    same = [c for c in one if c.startswith(("loss/", "policy/", "critic/", "preference/"))]
    assert len(same) > 3
    assert one.loc[4, same].equals(other.loc[4, same])


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(open_algorithm):
    session = open_algorithm("dapo", "trainer.train_batch_size=64")
    session.train(steps=2).wait(60)
    for step in (1, 2):
        samples = session.samples(step)
        groups = samples.groups()
        assert len(groups) == 8
        tasks = samples["reward/task"]
        assert all(len({tasks[row] for row in rows}) > 1 for rows in groups.values())
    assert session.metrics["rollout/constant_groups_dropped"].dropna().sum() > 0
