import numpy as np
import pytest
import torch

from verl_lab.batch.columns import Batch
from verl_lab.engines.trainer.attention import NAME
from verl_lab.engines.trainer.policy import PackedPolicy
from verl_lab.errors import ShapeError

BETAS = (0.9, 0.999)


def plain_logprobs(model, batch, temperature):
    """What a full forward pass per sample gives, without packing."""
    rows = []
    for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        found = (logits / temperature).log_softmax(-1)
        rows.append(found[torch.arange(len(response)), torch.tensor(response)])
    return rows


def gradients(engine, batch, settings, ignore):
    """The gradient of one update, caught before the optimizer clears it."""
    caught = {}
    learner = engine._learner
    step = learner.optimizer.step

    def catch(numbers, peak=None):
        caught.update({n: p.grad.clone() for n, p in learner.model.named_parameters()})
        return step(numbers, peak)

    learner.optimizer.step = catch
    engine.update(batch, settings, ignore)
    return caught


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_packed_logprobs_are_those_of_each_sample_alone(trainer, tiny_model, batch, kind):
    plain = plain_logprobs(tiny_model(kind, torch.float64, "sdpa"), batch, 0.8)
    policy = PackedPolicy(tiny_model(kind, torch.float64, NAME), torch.float64)
    for limit in (1, 20, 10_000):
        for found, expected in zip(policy.score(batch, 0.8, limit), plain, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(found), expected.detach(), atol=1e-10, rtol=0
            )


def test_a_sliding_window_is_seen_by_packed_sequences_too(batch):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24}
    models = []
    for attention in ("sdpa", NAME):
        config = MistralConfig(
            **sizes,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=3,
            initializer_range=0.3,
        )
        config._attn_implementation = attention
        torch.manual_seed(0)
        models.append(MistralForCausalLM(config).double().eval())
    plain = plain_logprobs(models[0], batch, 1.0)
    found = PackedPolicy(models[1], torch.float64).score(batch, 1.0, 10_000)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other.detach(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_any_split_into_micro_batches_gives_the_same_gradient(
    trainer, batch, settings, ignore, aggregation, kl_coef
):
    if kl_coef:
        batch = batch.with_columns({"ref_logprobs": batch["rollout_logprobs"]})
    found = [
        gradients(
            trainer(),
            batch,
            settings(micro_batch_tokens=limit, loss_aggregation=aggregation, kl_coef=kl_coef),
            ignore,
        )
        for limit in (10_000, 25, 1)
    ]
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-10, rtol=0)


def test_the_gradient_is_that_of_a_loss_written_out_by_hand(
    trainer, tiny_model, batch, settings, ignore
):
    model = tiny_model("llama", torch.float64, "sdpa")
    total = 0.0
    num_tokens = sum(map(len, batch["response_ids"]))
    for logprobs, advantages in zip(
        plain_logprobs(model, batch, 0.8), batch["advantages"], strict=True
    ):
        ratio = (logprobs - logprobs.detach()).exp()
        total = total - (ratio * torch.tensor(advantages, dtype=torch.float64)).sum() / num_tokens
    total.backward()
    found = gradients(trainer(), batch, settings(), ignore)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-7, rtol=1e-6)


def test_on_policy_the_ratio_is_one_and_old_logprobs_are_the_policys(
    trainer, batch, settings, ignore
):
    expected = trainer().logprobs(batch, 0.8, 10_000)["old_logprobs"]
    done, metrics = trainer().update(batch, settings(), ignore)
    assert metrics["policy/ratio_max"] == 1
    assert metrics["policy/approx_kl"] == 0
    for found, row in zip(done["old_logprobs"], expected, strict=True):
        assert found == pytest.approx(row, abs=1e-6)


def test_several_updates_train_on_equal_shares_and_move_away_from_the_old_policy(
    trainer, batch, settings, ignore
):
    engine = trainer()
    reports = []
    done, metrics = engine.update(batch, settings(updates_per_step=2), reports.append)
    assert engine._learner.optimizer.num_updates == 2
    assert metrics["policy/ratio_max"] > 1
    assert reports[-1] == {"done": 2, "total": 2}
    expected = trainer().logprobs(batch, 0.8, 10_000)
    assert done["old_logprobs"] == expected["old_logprobs"]
    with pytest.raises(ShapeError, match="updates_per_step=5: the batch has only 4 groups"):
        engine.update(batch, settings(updates_per_step=5), ignore)


def test_masked_tokens_do_not_train_and_the_end_of_sequence_does(trainer, batch, settings, ignore):
    whole = gradients(trainer(), batch, settings(), ignore)
    masks = [[True] * len(r) for r in batch["response_ids"]]
    without_end = [[True] * (len(r) - 1) + [False] for r in batch["response_ids"]]
    same = gradients(trainer(), batch.with_columns({"loss_mask": masks}), settings(), ignore)
    other = gradients(trainer(), batch.with_columns({"loss_mask": without_end}), settings(), ignore)
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(same[name], whole[name])
    assert (other[name] - whole[name]).abs().max() > 1e-4


def test_the_kl_term_to_an_equal_reference_is_zero_and_has_no_gradient(
    trainer, batch, settings, ignore
):
    engine = trainer()
    with_reference = engine.ref_logprobs(batch, 0.8, 10_000)
    plain = gradients(trainer(), batch, settings(), ignore)
    found = gradients(trainer(), with_reference, settings(kl_coef=1.0), ignore)
    _, metrics = trainer().update(with_reference, settings(kl_coef=1.0), ignore)
    assert metrics["policy/kl_ref"] == pytest.approx(0, abs=1e-9)
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(found[name], plain[name], atol=1e-6, rtol=1e-5)


def test_training_makes_rewarded_responses_likelier(trainer, batch, settings, ignore):
    engine = trainer()
    before = engine.logprobs(batch, 0.8, 10_000)["old_logprobs"]
    for _ in range(5):
        engine.update(batch, settings(), ignore)
    after = engine.logprobs(batch, 0.8, 10_000)["old_logprobs"]
    gain = [np.sum(a) - np.sum(b) for a, b in zip(after, before, strict=True)]
    signs = [row[0] for row in batch["advantages"]]
    assert np.dot(gain, signs) > 0


def test_a_gradient_that_is_not_finite_makes_no_update(trainer, batch, settings, ignore):
    engine = trainer()
    weights = {n: p.clone() for n, p in engine._learner.model.named_parameters()}
    broken = [[float("inf")] * len(r) for r in batch["response_ids"]]
    _, metrics = engine.update(batch.with_columns({"advantages": broken}), settings(), ignore)
    assert metrics["policy/skipped_updates"] == 1
    assert all(torch.equal(p, weights[n]) for n, p in engine._learner.model.named_parameters())


def test_a_batch_without_what_an_update_needs_names_it(trainer, batch, settings, ignore):
    with pytest.raises(ShapeError, match="lacks advantages; it has group_id"):
        trainer().update(batch.without(["advantages"]), settings(), ignore)
    with pytest.raises(ShapeError, match="lacks ref_logprobs"):
        trainer().update(batch, settings(kl_coef=0.1), ignore)


def test_a_failed_update_leaves_no_gradient_behind(trainer, batch, settings, ignore):
    expected = gradients(trainer(), batch, settings(micro_batch_tokens=20), ignore)
    engine = trainer()

    def fail(progress):
        raise RuntimeError("between two micro-batches")

    with pytest.raises(RuntimeError, match="between two"):
        engine.update(batch, settings(micro_batch_tokens=20), fail)
    found = gradients(engine, batch, settings(micro_batch_tokens=20), ignore)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient)


def test_training_goes_on_bit_for_bit_after_saving_and_loading(
    trainer, batch, settings, ignore, tmp_path
):
    def train(engine, times):
        for _ in range(times):
            engine.update(batch, settings(weight_decay=0.1, lr_schedule="cosine"), ignore)
        return engine

    straight = train(trainer(dtype=torch.float32), 6)
    train(trainer(dtype=torch.float32), 3).save(tmp_path / "state")
    resumed = trainer(dtype=torch.float32, seed=5)
    resumed.load(tmp_path / "state")
    train(resumed, 3)
    for (name, one), other in zip(
        straight._learner.model.named_parameters(), resumed._learner.model.parameters(), strict=True
    ):
        assert torch.equal(one, other), name


def test_gradient_checkpointing_changes_no_gradient(trainer, batch, settings, ignore):
    plain = gradients(trainer(), batch, settings(), ignore)
    engine = trainer()
    engine._learner.model.activation_checkpointing_enable({"use_reentrant": False})
    engine._learner.model.train()
    for name, gradient in gradients(engine, batch, settings(), ignore).items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-10, rtol=0)


def test_bfloat16_computes_in_half_precision_over_float32_masters(
    tiny_model, batch, settings, ignore, tmp_path
):
    from safetensors.torch import load_file

    from verl_lab.engines.trainer.engine import PolicyTrainer
    from verl_lab.engines.trainer.learner import Learner

    learner = Learner(tiny_model("llama", torch.float32, NAME), BETAS, offload_optimizer=False)
    engine = PolicyTrainer(learner, lambda: None, torch.bfloat16)
    exact = engine.logprobs(batch, 0.8, 10_000)["old_logprobs"]
    _, metrics = engine.update(batch, settings(), ignore)
    assert metrics["policy/skipped_updates"] == 0
    assert all(p.dtype == torch.float32 for p in engine._learner.model.parameters())
    engine.publish(tmp_path / "w", 1)
    published = load_file(tmp_path / "w" / "rank0.safetensors")
    assert {t.dtype for t in published.values()} == {torch.bfloat16}
    assert isinstance(exact[0][0], float)


def test_one_sample_alone_is_a_batch_too(trainer, batch, settings, ignore):
    done, metrics = trainer().update(batch.slice(0, 1), settings(), ignore)
    assert len(done) == 1
    assert metrics["trainer/tokens"] == 3 + 5
    assert isinstance(done, Batch)


def test_one_long_sequence_among_short_ones_makes_no_large_block():
    from verl_lab.engines.trainer.attention import Layout

    lengths = torch.tensor([500, *[5] * 100, 9])
    layout = Layout.of(torch.cat([torch.zeros(1), lengths.cumsum(0)]).int())
    places = sum(bucket.num_sequences * bucket.max_length for bucket in layout.buckets)
    assert places <= 2 * int(lengths.sum())
    assert sorted(layout.inverse.tolist()) == list(range(int(lengths.sum())))
