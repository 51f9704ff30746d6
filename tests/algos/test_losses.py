"""Values by hand from the vectors that the references agree on, then invariants."""

import pytest
import torch

from verl_lab.algos.aggregate import normalisers, token_weights
from verl_lab.algos.losses import ppo_policy_loss
from verl_lab.errors import ShapeError

# Two samples, three and two tokens that train; the sixth is masked.
OLD = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.6, 1.0], dtype=torch.float64).log()
NEW = torch.tensor([0.6, 0.3, 0.45, 0.1, 0.6, 1.0], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([1, 1, 1, -2, -2, 0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, True, True, False])
SAMPLE = torch.tensor([0, 0, 0, 1, 1, 1])


def weights_of(mode, mask=MASK, sample=SAMPLE, max_tokens=4):
    tokens, sequences = normalisers(mask, sample)
    return token_weights(
        mask,
        sample,
        mode=mode,
        num_tokens=tokens,
        num_sequences=sequences,
        max_tokens=max_tokens,
    )


def loss_of(ratio, advantage, **bounds):
    """The loss of a single token whose ratio and advantage are given."""
    new, old = torch.tensor([ratio]).log(), torch.zeros(1)
    one = torch.ones(1)
    loss, _ = ppo_policy_loss(
        new, old, torch.tensor([advantage]), one.bool(), one, num_tokens=1, **bounds
    )
    return round(loss.item(), 6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),  # on-policy: -A
        (1.5, 1.0, -1.2),  # good token, already far up: held at 1 + clip
        (0.5, 1.0, -0.5),  # good token, gone down: not held back
        (0.5, -1.0, 0.8),  # bad token, already far down: held at 1 - clip
        (1.5, -1.0, 1.5),  # bad token, gone up: not held back
    ],
)
def test_a_token_loss_is_the_one_worked_out_by_hand(ratio, advantage, expected):
    assert loss_of(ratio, advantage) == expected


def test_each_bound_moves_its_own_side_only():
    assert loss_of(1.5, 1.0, clip_high=0.28) == -1.28
    assert loss_of(0.5, -1.0, clip_high=0.28) == 0.8
    assert loss_of(0.5, -1.0, clip_low=0.1) == 0.9
    assert loss_of(1.5, 1.0, clip_low=0.1) == -1.2


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 0.09),
        ("seq-mean-token-mean", 0.375),
        ("seq-mean-token-sum", 0.225),
        ("seq-mean-token-sum-norm", 0.05625),
    ],
)
def test_each_aggregation_gives_the_golden_value(mode, expected):
    loss, metrics = ppo_policy_loss(NEW, OLD, ADVANTAGES, MASK, weights_of(mode), num_tokens=5)
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    # Token 1 sits on the boundary 1.2; rounding may put it on either side of it.
    assert metrics["clip_fraction"].item() in (pytest.approx(0.4), pytest.approx(0.6))
    assert metrics["ratio_max"].item() == pytest.approx(2.0)


def test_a_fully_masked_sample_does_not_count():
    mask = torch.tensor([True, True, True, False, False, False])
    assert normalisers(mask, SAMPLE) == (3, 1)
    loss, _ = ppo_policy_loss(
        NEW, OLD, ADVANTAGES, mask, weights_of("seq-mean-token-mean", mask), num_tokens=3
    )
    assert loss.item() == pytest.approx((-1.2 - 0.75 - 1.2) / 3)


def test_on_policy_the_gradient_is_reinforce():
    logprobs = torch.randn(6, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(6, dtype=torch.float64)
    mask = torch.ones(6, dtype=torch.bool)
    loss, metrics = ppo_policy_loss(
        logprobs, logprobs, advantages, mask, weights_of("token-mean", mask), num_tokens=6
    )
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -advantages / 6)
    assert metrics["ratio_max"] == 1
    assert metrics["approx_kl"] == 0


@pytest.mark.parametrize("junk", [0.0, float("inf"), float("-inf"), float("nan")])
def test_what_is_masked_changes_nothing(junk):
    logprobs = torch.tensor([-1.0, -2.0, junk], requires_grad=True)
    old, advantages = torch.tensor([-1.1, -1.9, junk]), torch.tensor([1.0, -1.0, junk])
    mask = torch.tensor([True, True, False])
    weights = torch.tensor([0.5, 0.5, 0.0])
    loss, metrics = ppo_policy_loss(logprobs, old, advantages, mask, weights, num_tokens=2)
    loss.backward()
    short, _ = ppo_policy_loss(
        logprobs[:2], old[:2], advantages[:2], mask[:2], weights[:2], num_tokens=2
    )
    torch.testing.assert_close(loss, short)
    assert logprobs.grad[2] == 0
    assert logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
)
def test_micro_batches_add_up_to_the_batch_in_loss_gradient_and_metrics(mode):
    generator = torch.Generator().manual_seed(1)
    sample = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
    new, old, advantages = torch.randn(3, 10, generator=generator, dtype=torch.float64)
    mask = torch.rand(10, generator=generator) < 0.7
    tokens, sequences = normalisers(mask, sample)

    def part(rows):
        leaf = new[rows].clone().requires_grad_()
        weights = token_weights(
            mask[rows],
            sample[rows] - sample[rows].min(),
            mode=mode,
            num_tokens=tokens,
            num_sequences=sequences,
            max_tokens=8,
        )
        loss, metrics = ppo_policy_loss(
            leaf, old[rows], advantages[rows], mask[rows], weights, num_tokens=tokens
        )
        loss.backward()
        return loss, leaf.grad, metrics

    whole = part(slice(0, 10))
    pieces = [part(slice(0, 4)), part(slice(4, 6)), part(slice(6, 10))]
    torch.testing.assert_close(sum(p[0] for p in pieces), whole[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(torch.cat([p[1] for p in pieces]), whole[1], atol=1e-10, rtol=0)
    for name in ("clip_fraction", "approx_kl"):
        torch.testing.assert_close(sum(p[2][name] for p in pieces), whole[2][name])


def test_a_shape_error_names_the_shapes():
    good, bad = torch.zeros(3), torch.zeros(4)
    with pytest.raises(ShapeError, match=r"\(3,\), \(3,\), \(4,\)"):
        ppo_policy_loss(good, good, bad, good == 0, good, num_tokens=3)
