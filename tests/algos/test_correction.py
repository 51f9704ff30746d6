import math
from typing import get_args

import pytest
import torch

from verl_lab.algos.correction import Correction, correction_metrics, correction_weights
from verl_lab.algos.losses import ppo_policy_loss
from verl_lab.errors import ConfigError, ShapeError

# Two samples, three and two tokens that train; the sixth is masked. rho = 2, 1, 3 and 1, 1.2.
NEW = torch.tensor([0.6, 0.3, 0.45, 0.1, 0.6, 1.0], dtype=torch.float64).log()
OLD = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.6, 1.0], dtype=torch.float64).log()
ROLLOUT = torch.tensor([0.25, 0.4, 0.1, 0.2, 0.5, math.nan], dtype=torch.float64).log()
MASK = torch.tensor([True, True, True, True, True, False])
SAMPLE = torch.tensor([0, 0, 0, 1, 1, 1])
MODES = list(get_args(Correction))
each_mode = pytest.mark.parametrize("mode", MODES)


def weights_of(mode, low=0.0, high=math.inf, old=OLD, rollout=ROLLOUT, mask=MASK, sample=SAMPLE):
    return correction_weights(old, rollout, mask, sample, mode=mode, low=low, high=high)


def metrics_of(mode, low=0.0, high=math.inf):
    weights = weights_of(mode, low, high)
    found = correction_metrics(weights, OLD, ROLLOUT, MASK, SAMPLE, low=low, high=high)
    return {name: value.item() for name, value in found.items()}


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("tis", 0.0, math.inf, [2, 1, 3, 1, 1.2]),
        ("tis", 0.0, 2.0, [2, 1, 2, 1, 1.2]),
        ("tis", 1.1, 2.0, [2, 1, 2, 1, 1.2]),  # nothing is lifted to the lower bound
        ("mis", 0.0, 2.5, [2, 1, 0, 1, 1.2]),
        ("mis", 1.1, 2.5, [2, 0, 0, 0, 1.2]),
        ("sequence_tis", 0.0, math.inf, [6, 6, 6, 1.2, 1.2]),
        ("sequence_tis", 2.0, 3.0, [3, 3, 3, 1.2, 1.2]),
        ("sequence_mis", 0.0, 3.0, [0, 0, 0, 1.2, 1.2]),
        ("sequence_mis", 2.0, 7.0, [6, 6, 6, 0, 0]),
        ("geometric_filter", 0.0, 1.8, [0, 0, 0, 1, 1]),  # 6^(1/3) = 1.817121
        ("geometric_filter", 0.0, 1.82, [1, 1, 1, 1, 1]),
        ("geometric_filter", 1.095, 1.82, [1, 1, 1, 1, 1]),  # sqrt(1.2) = 1.095445
        ("geometric_filter", 1.096, 1.82, [1, 1, 1, 0, 0]),
    ],
)
def test_each_mode_gives_the_weights_worked_out_by_hand(mode, low, high, expected):
    assert weights_of(mode, low, high).tolist() == pytest.approx([*expected, 0])


@each_mode
def test_weights_are_those_of_a_loop_in_plain_python(mode):
    old, rollout = -1 + 0.4 * torch.randn(2, 30, dtype=torch.float64)
    mask, sample = torch.rand(30) < 0.8, torch.arange(30) // 4
    low, high = 0.8, 1.3
    expected = []
    for t in range(30):
        mine = [u for u in range(30) if sample[u] == sample[t] and mask[u]]
        logs = [(old[u] - rollout[u]).item() for u in mine]
        ratio = {
            "tis": math.exp(old[t] - rollout[t]),
            "mis": math.exp(old[t] - rollout[t]),
            "sequence_tis": math.exp(sum(logs)),
            "sequence_mis": math.exp(sum(logs)),
            "geometric_filter": math.exp(sum(logs) / max(len(logs), 1)),
        }[mode]
        inside = low <= ratio <= high
        if mode.endswith("tis"):
            weight = min(ratio, high)
        elif mode.endswith("mis"):
            weight = ratio if inside else 0
        else:
            weight = float(inside)
        expected.append(weight if mask[t] else 0)
    found = weights_of(mode, low, high, old, rollout, mask, sample).tolist()
    assert found == pytest.approx(expected, abs=1e-10)
    assert any(found)


def test_the_golden_loss_with_truncated_weights():
    advantages = torch.tensor([1, 1, 1, -2, -2, 0], dtype=torch.float64)
    weights = MASK.double() / 5 * weights_of("tis", high=2.0)
    loss, _ = ppo_policy_loss(NEW, OLD, advantages, MASK, weights, num_tokens=5)
    assert loss.item() == pytest.approx(-0.31)


def test_the_golden_metrics():
    found = metrics_of("tis", high=2.0)
    assert found["correction_ess"] == pytest.approx(0.906294, abs=1e-6)  # 7.2² / (5 * 11.44)
    assert found["truncated_fraction"] == pytest.approx(1 / 5)
    assert found["correction_mean"] == pytest.approx(7.2 / 5)


@pytest.mark.parametrize(
    ("mode", "low", "high", "truncated", "mean"),
    [
        ("tis", 0.0, math.inf, 0.0, 8.2 / 5),
        ("mis", 1.1, 2.5, 0.6, 3.2 / 5),
        ("sequence_tis", 0.0, 3.5, 0.6, 12.9 / 5),
        ("sequence_tis", 0.0, 6.0, 0.0, 20.4 / 5),  # the bound is reached and not passed
        ("sequence_mis", 2.0, 7.0, 0.4, 18 / 5),
        ("geometric_filter", 0.5, 1.8, 0.6, 2 / 5),
        ("geometric_filter", 0.5, 1.9, 0.0, 1.0),
    ],
)
def test_what_was_dropped_or_held_is_truncated(mode, low, high, truncated, mean):
    found = metrics_of(mode, low, high)
    assert found["truncated_fraction"] == pytest.approx(truncated)
    assert found["correction_mean"] == pytest.approx(mean)


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_processes_that_agree_need_no_correction(mode, dtype):
    logprobs = torch.randn(6, dtype=dtype)
    inputs = (logprobs, logprobs, MASK, SAMPLE)
    weights = correction_weights(*inputs, mode=mode, low=1.0, high=1.0)
    assert weights.tolist() == MASK.tolist()
    found = correction_metrics(weights, *inputs, low=1.0, high=1.0)
    assert [value.item() for value in found.values()] == [1, 0, 1]


def test_weights_that_are_all_zero_are_no_sample():
    found = metrics_of("mis", 50.0, 60.0)
    assert found == {"correction_ess": 0, "truncated_fraction": 1, "correction_mean": 0}


@pytest.mark.parametrize("length", [0, 6])
def test_nothing_unmasked_is_nothing_corrected(length):
    none = torch.zeros(length, dtype=torch.bool)
    inputs = (ROLLOUT[:length], OLD[:length], none, SAMPLE[:length])
    for mode in MODES:
        weights = correction_weights(*inputs, mode=mode, low=0.5, high=2.0)
        assert weights.tolist() == [0] * length
    found = correction_metrics(weights, *inputs, low=0.5, high=2.0)
    assert [value.item() for value in found.values()] == [1, 0, 1]


@each_mode
@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan])
def test_what_is_masked_changes_nothing(mode, junk):
    old, rollout = OLD.masked_fill(~MASK, junk), ROLLOUT.masked_fill(~MASK, junk)
    weights = weights_of(mode, 0.5, 1.5, old, rollout)
    assert weights.tolist() == weights_of(mode, 0.5, 1.5).tolist()
    spoiled = weights.masked_fill(~MASK, junk)
    found = correction_metrics(spoiled, old, rollout, MASK, SAMPLE, low=0.5, high=1.5)
    assert {name: value.item() for name, value in found.items()} == metrics_of(mode, 0.5, 1.5)


@each_mode
def test_gradients_do_not_pass(mode):
    old, rollout = torch.randn(2, 6, requires_grad=True).unbind()
    assert not weights_of(mode, 0.5, 2.0, old, rollout).requires_grad
    found = correction_metrics(old, old, rollout, MASK, SAMPLE, low=0.5, high=2.0)
    assert not any(value.requires_grad for value in found.values())


@each_mode
def test_policies_that_are_far_apart_stay_finite(mode):
    far = torch.tensor([-500.0, 0.0, -500.0, 0.0, 0.0, 0.0])
    for old, rollout in ((far, far * 0), (far * 0, far)):
        weights = weights_of(mode, 0.0, math.inf, old, rollout)
        assert weights.isfinite().all()
        assert weights.max() <= 1.0001 * math.exp(20)


@pytest.fixture
def bandit():
    """One step, five actions: logits of the policy, and of the one that samples; advantages."""
    return 0.7 * torch.randn(3, 5, dtype=torch.float64)


def bandit_gradient(bandit, high):
    """The expected gradient of the corrected loss, over all actions, and of E_policy[A]."""
    logits, behaviour, advantages = bandit
    logits = logits.clone().requires_grad_()
    logprobs, rollout = logits.log_softmax(-1), behaviour.log_softmax(-1)
    mask, actions = torch.ones(5, dtype=torch.bool), torch.arange(5)
    correction = weights_of("tis", 0.0, high, logprobs, rollout, mask, actions)
    loss, _ = ppo_policy_loss(
        logprobs, logprobs, advantages, mask, rollout.exp() * correction, num_tokens=5
    )
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (exact,) = torch.autograd.grad(-(logprobs.exp() * advantages).sum(), logits)
    return found, exact


def test_without_a_bound_the_expected_gradient_is_that_of_the_policy_itself(bandit):
    found, exact = bandit_gradient(bandit, math.inf)
    torch.testing.assert_close(found, exact, atol=1e-10, rtol=0)


def test_a_bound_makes_the_gradient_biased(bandit):
    found, exact = bandit_gradient(bandit, 1.0)
    assert (found - exact).abs().max() > 0.01


def test_taking_the_rollout_for_old_is_the_same_where_nothing_is_clipped():
    base = -2 + torch.randn(8, dtype=torch.float64)
    old, rollout, new = base + 0.03 * torch.randn(3, 8, dtype=torch.float64)
    advantages, mask = torch.randn(8, dtype=torch.float64), torch.rand(8) < 0.8
    sample, weights = torch.arange(8) // 3, mask.double() / mask.sum()
    correction = weights_of("tis", 0.0, math.inf, old, rollout, mask, sample)
    found = []
    for before, factor in ((rollout, 1), (old, correction)):
        leaf = new.clone().requires_grad_()
        loss, metrics = ppo_policy_loss(
            leaf, before, advantages, mask, weights * factor, num_tokens=int(mask.sum())
        )
        loss.backward()
        assert metrics["clip_fraction"] == 0
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=0)


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="mode: no such choice 'icepop'; use one of tis, mis, "):
        weights_of("icepop")


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(ConfigError, match=r"low must be at most high, got 2\.0 and 0\.5; swap"):
        weights_of("mis", 2.0, 0.5)
    with pytest.raises(ConfigError, match=r"low must be at most high, got 2\.0 and 0\.5; swap"):
        correction_metrics(OLD, OLD, OLD, MASK, SAMPLE, low=2.0, high=0.5)


def test_a_shape_error_names_every_tensor_with_its_shape():
    with pytest.raises(ShapeError, match=r"loss_mask \(6,\), sample_index \(5,\)"):
        weights_of("tis", sample=SAMPLE[:5])
    with pytest.raises(ShapeError, match=r"weights \(5,\), loss_mask \(6,\)"):
        correction_metrics(OLD[:5], OLD, OLD, MASK, SAMPLE, low=0.5, high=2.0)
