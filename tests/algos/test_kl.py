import pytest
import torch

from verl_lab.algos.kl import kl

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


def test_policies_that_are_far_apart_stay_finite():
    far = kl(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]), "k3")
    assert far.tolist() == [10.0, 10.0]
