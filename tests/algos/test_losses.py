"""Values by hand from the vectors that the references agree on, then invariants."""

import math

import pytest
import torch

from verl_lab.algos.losses import ppo_policy_loss
from verl_lab.errors import ShapeError

# Two samples, three and two tokens that train; the sixth is masked.
OLD = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.6, 1.0], dtype=torch.float64).log()
NEW = torch.tensor([0.6, 0.3, 0.45, 0.1, 0.6, 1.0], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([1, 1, 1, -2, -2, 0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, True, True, False])


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


def test_the_golden_batch_gives_the_golden_loss_and_metrics():
    loss, metrics = ppo_policy_loss(NEW, OLD, ADVANTAGES, MASK, MASK.double() / 5, num_tokens=5)
    assert loss.item() == pytest.approx(0.09, abs=1e-9)
    # r - 1 - ln r of the five ratios
    expected = sum(r - 1 - math.log(r) for r in (1.2, 0.75, 1.5, 0.5, 1)) / 5
    assert metrics["approx_kl"].item() == pytest.approx(expected)
    assert metrics["ratio_max"].item() == pytest.approx(2.0)  # of 1.5 and 1 / 0.5
    # Off the first token's boundary, where rounding decides: 1.5 and 0.5 of five are stopped.
    _, metrics = ppo_policy_loss(
        NEW, OLD, ADVANTAGES, MASK, MASK.double() / 5, num_tokens=5, clip_high=0.21
    )
    assert metrics["clip_fraction"].item() == pytest.approx(0.4)


def test_metrics_have_no_gradient_and_neither_have_the_other_inputs():
    inputs = [t.clone().requires_grad_() for t in (NEW, OLD, ADVANTAGES)]
    loss, metrics = ppo_policy_loss(*inputs, MASK, MASK.double() / 5, num_tokens=5)
    loss.backward()
    assert [t.grad is None for t in inputs] == [False, True, True]
    assert not any(value.requires_grad for value in metrics.values())


def test_the_gradient_stops_at_the_bound_and_nowhere_else():
    new = torch.tensor([1.5, 0.5, 0.5, 1.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    one = torch.ones(4)
    loss, _ = ppo_policy_loss(new, torch.zeros(4), advantages, one.bool(), one, num_tokens=4)
    loss.backward()
    assert new.grad.tolist() == pytest.approx([0, -0.5, 0, 1.5])  # -A r where it is not stopped


def test_ratios_beyond_the_range_of_floats_stay_finite():
    new, old = torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])
    one = torch.ones(2)
    loss, metrics = ppo_policy_loss(new, old, -one, one.bool(), one, num_tokens=2)
    assert loss.item() == pytest.approx(math.exp(20) + 0.8, rel=1e-6)
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(20), rel=1e-5)


def test_approx_kl_of_policies_that_almost_agree_is_not_lost_to_rounding():
    old = torch.tensor([-3.0, -2.0])
    new = old + torch.tensor([1e-4, -1e-4])
    one = torch.ones(2)
    _, metrics = ppo_policy_loss(new, old, one, one.bool(), one, num_tokens=2)
    assert metrics["approx_kl"].item() == pytest.approx(5e-9, rel=0.01)  # d^2 / 2


@pytest.mark.parametrize("length", [0, 6])
def test_an_update_without_a_token_that_trains_is_zero(length):
    mask = torch.zeros(length, dtype=torch.bool)
    inputs = (NEW[:length], OLD[:length], ADVANTAGES[:length])
    loss, metrics = ppo_policy_loss(*inputs, mask, mask.double(), num_tokens=0)
    assert loss == 0
    assert {name: value.item() for name, value in metrics.items()} == {
        "clip_fraction": 0,
        "approx_kl": 0,
        "ratio_max": 1,
    }


def test_on_policy_the_gradient_is_reinforce():
    logprobs = torch.randn(6, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(6, dtype=torch.float64)
    mask = torch.ones(6, dtype=torch.bool)
    loss, metrics = ppo_policy_loss(
        logprobs, logprobs, advantages, mask, mask.double() / 6, num_tokens=6
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


def test_metrics_of_micro_batches_add_up_and_the_largest_is_the_largest():
    new, old, advantages = 0.5 * torch.randn(3, 10, dtype=torch.float64)
    mask = torch.rand(10) < 0.7
    tokens = int(mask.sum())

    def part(rows):
        weights = mask[rows].double() / tokens
        return ppo_policy_loss(
            new[rows], old[rows], advantages[rows], mask[rows], weights, num_tokens=tokens
        )[1]

    whole = part(slice(0, 10))
    pieces = [part(slice(0, 4)), part(slice(4, 5)), part(slice(5, 10))]
    assert whole["clip_fraction"] > 0
    for name in ("clip_fraction", "approx_kl"):
        torch.testing.assert_close(sum(p[name] for p in pieces), whole[name], atol=1e-10, rtol=0)
    assert max(p["ratio_max"] for p in pieces) == whole["ratio_max"]


def test_a_shape_error_names_every_tensor_with_its_shape():
    good, bad = torch.zeros(3), torch.zeros(4)
    with pytest.raises(ShapeError, match=r"logprobs \(3,\), .*advantages \(4,\), loss_mask \(3,\)"):
        ppo_policy_loss(good, good, bad, good == 0, good, num_tokens=3)
    with pytest.raises(ShapeError, match=r"logprobs \(1, 3\)"):
        ppo_policy_loss(*[good[None]] * 3, good[None] == 0, good[None], num_tokens=3)
