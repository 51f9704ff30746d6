import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.engines.conftest import SIZES
from verl_lab.batch.columns import Batch
from verl_lab.engines.trainer.attention import NAME
from verl_lab.engines.trainer.learner import Learner, plan_micro_batches
from verl_lab.engines.trainer.scorer import ScorerTrainer
from verl_lab.errors import ConfigError, ShapeError

BETAS = (0.9, 0.999)


def scorer(seed=0, attention=NAME, dtype=torch.float64):
    config = LlamaConfig(**SIZES, num_key_value_heads=4, num_labels=1, initializer_range=0.3)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(config).to(dtype).eval()


def critic_of(model):
    return {
        "critic": Learner(model, BETAS, offload_optimizer=False),
        "critic_head": model.score,
    }


@pytest.fixture
def pairs(batch):
    """The batch as four pairs, the first sample of each chosen."""
    return batch.with_columns({"is_chosen": [True, False] * 4})


@pytest.fixture
def with_values(batch):
    generator = torch.Generator().manual_seed(5)

    def noise(row):
        return torch.randn(len(row), generator=generator).tolist()

    return batch.with_columns(
        {
            "values": [noise(r) for r in batch["response_ids"]],
            "returns": [noise(r) for r in batch["response_ids"]],
        }
    )


def plain_scores(model, batch):
    """Of the state before each response token, and at the last one, without packing."""
    values, scores = [], []
    for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True):
        hidden = model.model(torch.tensor([prompt + response])).last_hidden_state[0]
        found = model.score(hidden)[:, 0]
        values.append(found[len(prompt) - 1 : -1].tolist())
        scores.append(found[-1])
    return values, scores


def test_values_are_those_of_the_state_before_each_token(trainer, batch):
    engine = trainer(**critic_of(scorer()))
    expected, _ = plain_scores(scorer(attention="sdpa"), batch)
    for limit in (1, 10_000):
        for found, row in zip(engine.values(batch, limit)["values"], expected, strict=True):
            assert found == pytest.approx(row, abs=1e-6)


def test_the_critic_moves_towards_the_returns_and_the_policy_trains_beside_it(
    trainer, with_values, settings, ignore
):
    engine = trainer(**critic_of(scorer()))
    numbers = settings(critic_learning_rate=1e-2, value_clip=None)
    errors = []
    for _ in range(8):
        batch = engine.values(with_values, 10_000)
        _, metrics = engine.update(batch, numbers, ignore)
        errors.append(metrics["loss/critic"])
    assert errors[-1] < errors[0] / 2
    assert metrics["policy/grad_norm"] > 0
    assert metrics["critic/grad_norm"] > 0
    assert metrics["critic/explained_variance"] <= 1


def test_while_the_critic_warms_up_the_policy_stays(trainer, with_values, settings, ignore):
    engine = trainer(**critic_of(scorer()))
    before = {n: p.clone() for n, p in engine._learner.model.named_parameters()}
    head = engine._critic.model.score.weight.clone()
    engine.update(with_values, settings(trains_policy=False), ignore)
    assert all(torch.equal(p, before[n]) for n, p in engine._learner.model.named_parameters())
    assert not torch.equal(engine._critic.model.score.weight, head)


def test_a_head_on_the_policys_trunk_gives_it_a_gradient_except_while_it_warms_up(
    trainer, with_values, settings, ignore
):
    def engine():
        torch.manual_seed(1)
        head = nn.Linear(SIZES["hidden_size"], 1).double()
        return trainer(critic=Learner(head, BETAS, offload_optimizer=False))

    quiet = with_values.with_columns(
        {"advantages": [[0.0] * len(r) for r in with_values["values"]]}
    )
    warm, shared = engine(), engine()
    before = warm._learner.model.model.embed_tokens.weight.clone()
    warm.update(quiet, settings(trains_policy=False), ignore)
    shared.update(quiet, settings(), ignore)
    assert torch.equal(warm._learner.model.model.embed_tokens.weight, before)
    assert not torch.equal(shared._learner.model.model.embed_tokens.weight, before)
    values = shared.values(quiet, 10_000)["values"]
    assert [len(row) for row in values] == [len(row) for row in quiet["response_ids"]]


def test_supervised_loss_is_the_mean_negative_log_likelihood(trainer, batch, settings, ignore):
    engine = trainer()
    rows = batch.select(["group_id", "prompt_ids", "response_ids", "response_mask"])
    expected = -np.mean(np.concatenate(engine.logprobs(rows, 1.0, 10_000).lists("old_logprobs")))
    numbers = settings(objective="sft", temperature=1.0)
    _, metrics = engine.update(rows, numbers, ignore)
    assert metrics["loss/sft"] == pytest.approx(expected, abs=1e-6)
    for _ in range(10):
        engine.update(rows, numbers, ignore)
    assert engine.evaluate(rows, numbers)["loss/sft"] < expected / 2


def test_before_training_the_loss_of_dpo_is_log_two_and_then_the_chosen_win(
    trainer, pairs, settings, ignore
):
    engine = trainer()
    numbers = settings(objective="preference", beta=0.5, temperature=1.0)
    known = engine.ref_logprobs(pairs, 1.0, 10_000)
    _, metrics = engine.update(known, numbers, ignore)
    assert metrics["loss/preference"] == pytest.approx(math.log(2), abs=1e-6)
    for _ in range(6):
        engine.update(known, numbers, ignore)
    found = engine.evaluate(pairs, numbers)
    assert found["preference/accuracy"] == 1
    assert found["preference/margin"] > 0
    assert found["preference/margin"] == pytest.approx(
        found["preference/chosen"] - found["preference/rejected"]
    )


@pytest.mark.parametrize("limit", [25, 1])
@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto"])
def test_any_split_of_pairs_into_micro_batches_gives_the_same_update(
    trainer, pairs, settings, ignore, limit, loss
):
    weights = []
    for tokens in (10_000, limit):
        engine = trainer()
        known = engine.ref_logprobs(pairs, 1.0, 10_000)
        numbers = settings(objective="preference", preference_loss=loss, micro_batch_tokens=tokens)
        engine.update(known, numbers, ignore)
        weights.append(engine._learner.model.model.embed_tokens.weight)
    torch.testing.assert_close(*weights, atol=1e-9, rtol=0)


def test_kto_learns_from_labels_alone(trainer, pairs, settings, ignore):
    engine = trainer()
    labelled = pairs.with_columns({"group_id": list(range(8))})
    numbers = settings(objective="preference", preference_loss="kto", beta=0.5)
    known = engine.ref_logprobs(labelled, 1.0, 10_000)
    for _ in range(6):
        _, metrics = engine.update(known, numbers, ignore)
    assert metrics["preference/chosen"] > metrics["preference/rejected"]


def test_a_pair_is_never_split_over_micro_batches(pairs):
    for limit in (1, 25, 40):
        for rows in plan_micro_batches(pairs, limit, whole_groups=True):
            found = [pairs["group_id"][row] for row in rows]
            assert all(found.count(group) == 2 for group in found)


def test_a_reward_model_scores_the_last_token_and_learns_to_rank(pairs, settings, ignore):
    model = scorer()
    engine = ScorerTrainer(
        Learner(model, BETAS, offload_optimizer=False), model.score, torch.float64
    )
    _, expected = plain_scores(scorer(attention="sdpa"), pairs)
    for limit in (1, 10_000):
        assert engine.score(pairs, limit)["reward"] == pytest.approx(
            [score.item() for score in expected], abs=1e-9
        )
    loss = -np.mean(
        [
            torch.nn.functional.logsigmoid(a - b).item()
            for a, b in zip(expected[::2], expected[1::2], strict=True)
        ]
    )
    numbers = settings(objective="reward_model", learning_rate=1e-2)
    assert engine.evaluate(pairs, numbers)["loss/reward_model"] == pytest.approx(loss)
    for _ in range(10):
        done, _ = engine.update(pairs, numbers, ignore)
    assert engine.evaluate(pairs, numbers)["preference/accuracy"] == 1
    rewards = done["reward"]
    assert all(a > b for a, b in zip(rewards[::2], rewards[1::2], strict=True))


def test_a_margin_asks_for_more_distance(pairs, settings, ignore):
    def loss_with(batch):
        model = scorer()
        learner = Learner(model, BETAS, offload_optimizer=False)
        engine = ScorerTrainer(learner, model.score, torch.float64)
        return engine.evaluate(batch, settings(objective="reward_model"))["loss/reward_model"]

    assert loss_with(pairs.with_columns({"margin": [2.0] * 8})) > loss_with(pairs)


def test_bypass_takes_the_rollouts_logprobs_as_the_old_ones(trainer, batch, settings, ignore):
    done, metrics = trainer().update(batch, settings(bypass=True), ignore)
    for old, rollout in zip(done["old_logprobs"], batch["rollout_logprobs"], strict=True):
        assert old == rollout
    assert metrics["policy/ratio_max"] > 1


def test_a_correction_weighs_the_loss_and_is_measured(trainer, batch, settings, ignore):
    _, plain = trainer().update(batch, settings(), ignore)
    numbers = settings(correction="tis", correction_bounds=(0.0, 0.3))
    _, corrected = trainer().update(batch, numbers, ignore)
    assert corrected["loss/policy"] != pytest.approx(plain["loss/policy"])
    assert 0 < corrected["policy/correction_ess"] <= 1
    assert 0 < corrected["policy/truncated_fraction"] < 1
    assert "policy/chi2" in plain


def test_an_entropy_bonus_raises_the_entropy(trainer, batch, settings, ignore):
    quiet = batch.with_columns({"advantages": [[0.0] * len(r) for r in batch["response_ids"]]})
    engine = trainer()
    _, first = engine.update(quiet, settings(entropy_coef=0.1), ignore)
    _, second = engine.update(quiet, settings(entropy_coef=0.1), ignore)
    assert second["policy/entropy"] > first["policy/entropy"]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "sapo", "reinforce", "dppo"])
def test_every_policy_loss_makes_rewarded_responses_likelier(
    trainer, batch, settings, ignore, loss
):
    engine = trainer()
    before = engine.logprobs(batch, 0.8, 10_000).lists("old_logprobs")
    for _ in range(5):
        engine.update(batch, settings(policy_loss=loss), ignore)
    after = engine.logprobs(batch, 0.8, 10_000).lists("old_logprobs")
    gain = [a.sum() - b.sum() for a, b in zip(after, before, strict=True)]
    assert np.dot(gain, [row[0] for row in batch["advantages"]]) > 0


def test_an_option_that_a_loss_does_not_have_is_refused(trainer, batch, settings, ignore):
    with pytest.raises(
        ConfigError, match=r"loss_options: .* no option 'delta'; it has .*dual_clip"
    ):
        trainer().update(batch, settings(loss_options={"delta": 0.1}), ignore)


def test_pairs_without_labels_are_refused_by_name(trainer, batch, settings, ignore):
    with pytest.raises(ShapeError, match="lacks is_chosen, ref_logprobs"):
        trainer().update(batch, settings(objective="preference"), ignore)
    assert isinstance(batch, Batch)
