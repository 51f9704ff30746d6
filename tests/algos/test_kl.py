import math

import pytest
import torch

from verl_lab.algos.kl import adapted_coefficient, kl
from verl_lab.errors import ConfigError, ShapeError

POLICY = torch.tensor([0.6, 0.3, 0.45, 0.1, 0.6], dtype=torch.float64).log()
REFERENCE = torch.tensor([0.5, 0.5, 0.5, 0.25, 0.5], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", -0.233567), ("k2", 0.117811), ("k3", 0.155322), ("straight_through", 0.155322)],
)
def test_each_estimator_gives_the_golden_mean(estimator, expected):
    assert kl(POLICY, REFERENCE, estimator).mean().item() == pytest.approx(expected, abs=1e-6)


def test_k3_is_never_negative_and_zero_where_both_agree():
    policy, reference = torch.randn(2, 1000, dtype=torch.float64)
    assert (kl(policy, reference, "k3") >= 0).all()
    assert (kl(policy, policy, "k3") == 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expectation_over_all_tokens_is_the_kl_divergence(estimator):
    policy, reference = (0.5 * torch.randn(2, 7, dtype=torch.float64)).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    estimate = (policy.exp() * kl(policy, reference, estimator)).sum()
    torch.testing.assert_close(estimate, exact)


@pytest.mark.parametrize("estimator", ["k2", "straight_through"])
def test_the_expected_gradient_is_that_of_the_kl_divergence(estimator):
    logits = (0.5 * torch.randn(5, dtype=torch.float64)).requires_grad_()
    reference = (0.5 * torch.randn(5, dtype=torch.float64)).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    sampled = (logprobs.exp().detach() * kl(logprobs, reference, estimator)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(sampled, logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("estimator", "slope"),
    [
        ("k1", 1.0),
        ("k2", 0.5),  # d
        ("k3", 1 - math.exp(-0.5)),
        ("straight_through", 0.5),  # that of k2
    ],
)
def test_the_slope_at_half_is_the_one_worked_out_by_hand(estimator, slope):
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    kl(policy, reference, estimator).sum().backward()
    assert policy.grad.item() == pytest.approx(slope)
    assert reference.grad is None


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [10, -10], [0, 0]),
        ("k2", [10, 10], [0, 0]),
        ("k3", [10, 10], [0, 0]),
        ("straight_through", [10, 10], [15, -15]),  # d, up to 20
    ],
)
def test_policies_that_are_far_apart_are_bounded(estimator, values, slopes):
    policy = torch.tensor([-1.0, -16.0], requires_grad=True)
    found = kl(policy, torch.tensor([-16.0, -1.0]), estimator)
    found.sum().backward()
    assert found.tolist() == pytest.approx(values)
    assert policy.grad.tolist() == slopes


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "straight_through"])
def test_policies_beyond_the_range_of_floats_stay_finite_and_get_no_gradient(estimator):
    policy = torch.tensor([0.0, -500.0], requires_grad=True)
    far = kl(policy, torch.tensor([-500.0, 0.0]), estimator)
    far.sum().backward()
    assert far.abs().tolist() == [10.0, 10.0]
    assert policy.grad.tolist() == [0.0, 0.0]


def test_k3_of_policies_that_almost_agree_is_neither_negative_nor_lost_to_rounding():
    policy = torch.randn(10_000) - 3
    reference = policy + 1e-4 * torch.randn(10_000)
    found, exact = kl(policy, reference, "k3"), kl(policy.double(), reference.double(), "k3")
    assert (found >= 0).all()
    torch.testing.assert_close(found.mean().double(), exact.mean(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("junk", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "straight_through"])
def test_what_is_masked_first_changes_nothing(estimator, junk):
    policy = torch.tensor([-1.0, junk], requires_grad=True)
    mask = torch.tensor([True, False])
    reference = torch.where(mask, torch.tensor([-1.5, junk]), 0.0)
    found = kl(torch.where(mask, policy, 0.0), reference, estimator)
    found.sum().backward()
    assert found[1] == 0
    assert policy.grad[1] == 0


def test_an_estimator_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="estimator: no such choice 'k4'; use one of k1, k2, "):
        kl(POLICY, REFERENCE, "k4")


def test_shapes_that_torch_would_broadcast_are_refused():
    with pytest.raises(ShapeError, match=r"logprobs \(5,\), ref_logprobs \(5, 1\)"):
        kl(POLICY, REFERENCE[:, None], "k1")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "straight_through"])
def test_estimates_are_those_of_a_loop_in_plain_python(estimator):
    policy, reference = 6 * torch.randn(2, 60, dtype=torch.float64)
    expected = []
    for mine, theirs in zip(policy.tolist(), reference.tolist(), strict=True):
        d = min(max(mine - theirs, -20), 20)
        value = {"k1": d, "k2": d * d / 2}.get(estimator, math.exp(-d) + d - 1)
        expected.append(min(max(value, -10), 10))
    assert kl(policy, reference, estimator).tolist() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (6.0, 0.2),  # on target
        (6.6, 0.2002),  # a tenth above: 0.1 * 100 / 10_000
        (5.4, 0.1998),
        (7.2, 0.2004),  # a fifth above, as far as it goes
        (60.0, 0.2004),
        (0.0, 0.1996),
        (-60.0, 0.1996),  # an estimate may be negative
    ],
)
def test_the_coefficient_follows_the_kl_it_is_to_hold_a_fifth_at_most(measured, expected):
    found = adapted_coefficient(0.2, measured, target=6.0, num_samples=100)
    assert found == pytest.approx(expected, rel=1e-12)


def test_the_horizon_says_how_many_samples_make_up_the_whole_change():
    found = adapted_coefficient(2.0, 9.0, target=3.0, num_samples=50, horizon=100)
    assert found == pytest.approx(2.2, rel=1e-12)  # 2 * (1 + 0.2 / 2)


def test_the_coefficient_is_that_of_a_loop_in_plain_python():
    mine = theirs = 0.3
    for measured in (0.1, 0.5, 0.19, 0.21, 3.0, 0.0):
        mine = adapted_coefficient(mine, measured, target=0.2, num_samples=64, horizon=500)
        error = measured / 0.2 - 1
        if error > 0.2:
            error = 0.2
        elif error < -0.2:
            error = -0.2
        theirs += theirs * error * 64 / 500
    assert mine == pytest.approx(theirs, rel=1e-10)
