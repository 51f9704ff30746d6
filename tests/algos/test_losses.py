"""Values by hand, and from the vectors that the references agree on."""

import math

import pytest
import torch

from verl_lab.algos.aggregate import token_weights
from verl_lab.algos.losses import (
    cispo_policy_loss,
    dppo_policy_loss,
    gspo_policy_loss,
    ppo_policy_loss,
    reinforce_policy_loss,
    sapo_policy_loss,
)
from verl_lab.algos.ratio import masked_tokens
from verl_lab.errors import ConfigError, ShapeError

# Two samples, three and two tokens that train; the sixth is masked.
OLD = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.6, 1.0], dtype=torch.float64).log()
NEW = torch.tensor([0.6, 0.3, 0.45, 0.1, 0.6, 1.0], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([1, 1, 1, -2, -2, 0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, True, True, False])
SAMPLE = torch.tensor([0, 0, 0, 1, 1, 1])
GOLDEN = (NEW, OLD, ADVANTAGES, MASK)


def of_token(loss, ratio, advantage, old=0.0, **numbers):
    """The loss of a single token whose ratio and advantage are given, and its gradient."""
    new = torch.tensor([math.log(ratio) + old], dtype=torch.float64, requires_grad=True)
    one, index = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    found, _ = loss(
        new,
        one * old,
        one * advantage,
        one.bool(),
        one,
        num_tokens=1,
        sample_index=index,
        **numbers,
    )
    found.backward()
    return round(found.item(), 9), round(new.grad.item(), 9)


# --- PPO


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on-policy: -A
        (1.5, 1.0, -1.2, 0.0),  # good token, already far up: held at 1 + clip
        (0.5, 1.0, -0.5, -0.5),  # good token, gone down: not held back
        (0.5, -1.0, 0.8, 0.0),  # bad token, already far down: held at 1 - clip
        (1.5, -1.0, 1.5, 1.5),  # bad token, gone up: not held back
    ],
)
def test_a_token_loss_of_ppo_is_the_one_worked_out_by_hand(ratio, advantage, expected, slope):
    assert of_token(ppo_policy_loss, ratio, advantage) == (expected, slope)


def test_each_bound_moves_its_own_side_only():
    assert of_token(ppo_policy_loss, 1.5, 1.0, clip_high=0.28)[0] == -1.28
    assert of_token(ppo_policy_loss, 0.5, -1.0, clip_high=0.28)[0] == 0.8
    assert of_token(ppo_policy_loss, 0.5, -1.0, clip_low=0.1)[0] == 0.9
    assert of_token(ppo_policy_loss, 1.5, 1.0, clip_low=0.1)[0] == -1.2


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (5.0, -2.0, 6.0, 0.0),  # -A c
        (2.0, -2.0, 4.0, 4.0),  # below c
        (5.0, 2.0, -2.4, 0.0),  # good tokens know only the other bound
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_dual_clip_holds_the_loss_of_bad_tokens(ratio, advantage, expected, slope):
    assert of_token(ppo_policy_loss, ratio, advantage, dual_clip=3.0) == (expected, slope)


def test_dual_clip_tells_the_share_that_it_stopped():
    new, one = torch.tensor([5.0, 2.0, 5.0, 0.1]).log(), torch.ones(4)
    advantages = torch.tensor([-1.0, -1.0, 1.0, -1.0])
    inputs = (new, 0 * one, advantages, one.bool(), one)
    _, metrics = ppo_policy_loss(*inputs, num_tokens=8, dual_clip=3.0)
    assert metrics["dual_clip_fraction"].item() == 1 / 8
    assert metrics["clip_fraction"].item() == 2 / 8  # the third and the fourth


@pytest.mark.parametrize("dual_clip", [1.0, 0.0, -3.0, math.nan])
def test_a_dual_clip_that_is_not_above_one_is_refused(dual_clip):
    with pytest.raises(ConfigError, match=f"dual_clip: must be above 1, got {dual_clip}; 3 is"):
        of_token(ppo_policy_loss, 1.0, 1.0, dual_clip=dual_clip)


def test_the_golden_ratios():
    tokens = masked_tokens(*GOLDEN, MASK.double())
    assert tokens.log_ratio.exp().tolist() == pytest.approx([1.2, 0.75, 1.5, 0.5, 1, 1])


def test_the_golden_token_losses():
    found = [ppo_policy_loss(*GOLDEN, one, num_tokens=5)[0] for one in torch.eye(6).double()]
    assert found == pytest.approx([-1.2, -0.75, -1.2, 1.6, 2.0, 0])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 0.09),
        ("seq-mean-token-mean", 0.375),
        ("seq-mean-token-sum", 0.225),
        ("seq-mean-token-sum-norm", 0.05625),
    ],
)
def test_the_golden_loss_of_each_aggregation(mode, expected):
    weights = token_weights(MASK, SAMPLE, mode=mode, num_tokens=5, num_sequences=2, max_tokens=4)
    loss, _ = ppo_policy_loss(*GOLDEN, weights, num_tokens=5)
    assert loss.item() == pytest.approx(expected, abs=1e-9)


def test_the_golden_metrics():
    _, metrics = ppo_policy_loss(*GOLDEN, MASK.double() / 5, num_tokens=5)
    # r - 1 - ln r of the five ratios
    expected = sum(r - 1 - math.log(r) for r in (1.2, 0.75, 1.5, 0.5, 1)) / 5
    assert metrics["approx_kl"].item() == pytest.approx(expected)
    assert metrics["ratio_max"].item() == pytest.approx(2.0)  # of 1.5 and 1 / 0.5
    # Off the first token's boundary, where rounding decides: 1.5 and 0.5 of five are stopped.
    _, metrics = ppo_policy_loss(*GOLDEN, MASK.double() / 5, num_tokens=5, clip_high=0.21)
    assert metrics["clip_fraction"].item() == pytest.approx(0.4)


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


# --- the other losses


def test_gspo_clips_the_geometric_mean_of_each_sample():
    weights = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4, 0], dtype=torch.float64)
    knobs = {"num_tokens": 5, "sample_index": SAMPLE, "clip_low": 0.2, "clip_high": 0.2}
    loss, metrics = gspo_policy_loss(*GOLDEN, weights, **knobs)
    # s = 1.35^(1/3) with A = 1, and sqrt(0.5) with A = -2, which is held at 0.8
    assert loss.item() == pytest.approx((-(1.35 ** (1 / 3)) + 1.6) / 2)
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 5)
    assert metrics["ratio_max"].item() == pytest.approx(2.0)  # of single tokens


def test_gspo_gives_each_token_its_part_of_the_samples_gradient():
    new, weights = NEW.clone().requires_grad_(), MASK.double() / 3
    bounds = {"clip_low": 1.0, "clip_high": 1.0}
    inputs = (new, OLD, ADVANTAGES, MASK, weights)
    gspo_policy_loss(*inputs, num_tokens=5, sample_index=SAMPLE, **bounds)[0].backward()
    s = 1.35 ** (1 / 3), 0.5**0.5
    expected = [-s[0] / 3] * 3 + [2 * s[1] / 3] * 2 + [0]
    assert new.grad.tolist() == pytest.approx(expected)


def test_the_log_ratio_of_a_sample_is_held_at_ten():
    assert of_token(gspo_policy_loss, math.exp(12), -1.0) == (round(math.exp(10), 9), 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        (2.0, 1.0, 2.0),
        (7.0, 1.0, 5.0),  # held, and yet with a gradient
        (7.0, -1.0, 5.0),
        (0.1, -1.0, 0.1),  # no bound from below by default
    ],
)
def test_cispo_weighs_the_logprob_with_a_bounded_ratio(ratio, advantage, weight):
    loss, slope = of_token(cispo_policy_loss, ratio, advantage, old=-3.0)
    assert slope == pytest.approx(-weight * advantage)
    assert loss == pytest.approx(-weight * advantage * (math.log(ratio) - 3))


def test_the_bounds_of_cispo_are_of_the_ratio_itself():
    assert of_token(cispo_policy_loss, 0.1, -1.0, ratio_min=0.5)[1] == 0.5
    assert of_token(cispo_policy_loss, 7.0, -1.0, ratio_max=1.5)[1] == 1.5


def test_cispo_counts_what_is_out_of_bounds_whatever_its_advantage():
    bounds = {"ratio_min": 0.6, "ratio_max": 1.3}
    _, metrics = cispo_policy_loss(*GOLDEN, MASK.double(), num_tokens=5, **bounds)
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 5)  # 1.5 and 0.5


def test_sapo_by_hand():
    sigmoid = 1 / (1 + math.exp(-0.5))
    loss, slope = of_token(sapo_policy_loss, 1.5, 2.0)
    assert loss == pytest.approx(-2 * 4 * sigmoid)
    assert slope == pytest.approx(-2 * 4 * sigmoid * (1 - sigmoid) * 1.5)
    sigmoid = 1 / (1 + math.exp(0.525))  # 1.05 * -0.5
    loss, slope = of_token(sapo_policy_loss, 0.5, -2.0)
    assert loss == pytest.approx(2 * 4 / 1.05 * sigmoid)
    assert slope == pytest.approx(2 * 4 * sigmoid * (1 - sigmoid) * 0.5)


def test_reinforce_is_blind_to_the_ratio():
    assert of_token(reinforce_policy_loss, 1.5, 2.0, old=-3.0)[1] == -2
    assert of_token(reinforce_policy_loss, 9.0, 2.0, old=-3.0)[1] == -2
    assert of_token(reinforce_policy_loss, math.exp(2), 2.0, old=-3.0)[0] == 2  # -A * -1


@pytest.mark.parametrize(
    ("new", "old", "advantage", "weight"),
    [
        (0.75, 0.5, 1.0, 0.0),  # good token, up by 0.25: dropped
        (0.75, 0.5, -1.0, 1.5),  # bad token, up: back it goes
        (0.25, 0.5, -1.0, 0.0),  # bad token, down by 0.25: dropped
        (0.25, 0.5, 1.0, 0.5),
        (0.04, 0.01, 1.0, 4.0),  # rare token: the ratio is large, the move is not
        (0.15, 0.001, 1.0, 20.0),  # the ratio is held, with a gradient
    ],
)
def test_dppo_drops_what_moved_far_the_way_it_should(new, old, advantage, weight):
    loss, slope = of_token(dppo_policy_loss, new / old, advantage, old=math.log(old))
    assert slope == pytest.approx(-weight * advantage)
    assert loss == pytest.approx(-weight * advantage * math.log(new))


def test_dppo_counts_what_is_dropped_or_held():
    new = torch.tensor([0.75, 0.75, 0.15, 0.5]).log()
    old = torch.tensor([0.5, 0.5, 0.001, 0.5]).log()
    advantages, one = torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.ones(4)
    _, metrics = dppo_policy_loss(new, old, advantages, one.bool(), one, num_tokens=4)
    assert metrics["clip_fraction"].item() == 2 / 4


def test_gspo_needs_a_sample_for_each_token():
    with pytest.raises(ShapeError, match=r"weights \(6,\), sample_index \(5,\)"):
        gspo_policy_loss(*GOLDEN, MASK.double(), num_tokens=5, sample_index=SAMPLE[:5])
