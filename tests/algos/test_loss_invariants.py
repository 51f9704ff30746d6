"""What is true of every policy loss, and each against a loop in plain Python."""

import math

import pytest
import torch

from verl_lab.algos.losses import POLICY_LOSSES
from verl_lab.errors import ShapeError

CASES = [
    ("ppo", {}),
    ("ppo", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.4}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.05}),
    ("cispo", {}),
    ("cispo", {"ratio_min": 0.8, "ratio_max": 1.1}),
    ("sapo", {}),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 0.7}),
    ("reinforce", {}),
    ("dppo", {"delta": 0.05}),
    ("dppo", {}),
]
each_case = pytest.mark.parametrize(("name", "numbers"), CASES)
each_loss = pytest.mark.parametrize("name", list(POLICY_LOSSES))


@pytest.fixture
def ragged():
    """Five samples, the third without a token that trains; junk where masked."""
    sample = torch.arange(5).repeat_interleave(torch.tensor([7, 1, 3, 9, 6]))
    mask = (torch.rand(26) < 0.8) & (sample != 2)
    mask[sample == 1] = True
    new, old, advantages = torch.randn(3, 26, dtype=torch.float64)
    new, old = -1 + 0.4 * new, -1 + 0.4 * old
    weights = torch.where(mask, torch.rand(26, dtype=torch.float64), 0.0)
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)[:, None]
    values = torch.where(mask, torch.stack([new, old, advantages]), junk)
    return (*values, mask, weights, sample)


def run(name, new, old, advantages, mask, weights, sample, *, num_tokens=None, **numbers):
    """Loss, gradient and metrics."""
    leaf = new.clone().requires_grad_()
    loss, metrics = POLICY_LOSSES[name](
        leaf,
        old,
        advantages,
        mask,
        weights,
        num_tokens=int(mask.sum()) if num_tokens is None else num_tokens,
        sample_index=sample,
        **numbers,
    )
    loss.backward()
    return loss.detach(), leaf.grad, metrics


# --- plain Python, a token at a time; `frozen` is the log-probability that takes no gradient


def plain_clip(ratio, a, low, high):
    return max(-ratio * a, -min(max(ratio, 1 - low), 1 + high) * a)


def plain_ppo(new, frozen, old, a, mean, clip_low=0.2, clip_high=0.2, dual_clip=None):
    loss = plain_clip(math.exp(new - old), a, clip_low, clip_high)
    return min(loss, -a * dual_clip) if dual_clip and a < 0 else loss


def plain_gspo(new, frozen, old, a, mean, clip_low=3e-4, clip_high=4e-4):
    return plain_clip(math.exp(mean) * math.exp(new - frozen), a, clip_low, clip_high)


def plain_cispo(new, frozen, old, a, mean, ratio_min=0.0, ratio_max=5.0):
    return -min(max(math.exp(frozen - old), ratio_min), ratio_max) * a * new


def plain_sapo(new, frozen, old, a, mean, tau_positive=1.0, tau_negative=1.05):
    tau = tau_positive if a > 0 else tau_negative
    return -4 / tau / (1 + math.exp(-tau * (math.exp(new - old) - 1))) * a


def plain_reinforce(new, frozen, old, a, mean):
    return -a * new


def plain_dppo(new, frozen, old, a, mean, delta=0.2):
    up = math.exp(frozen) - math.exp(old)
    if (a > 0 and up > delta) or (a < 0 and -up > delta):
        return 0.0
    return -min(math.exp(frozen - old), 20) * a * new


PLAIN = {
    "ppo": plain_ppo,
    "gspo": plain_gspo,
    "cispo": plain_cispo,
    "sapo": plain_sapo,
    "reinforce": plain_reinforce,
    "dppo": plain_dppo,
}


def plain_loss(name, at, new, old, advantages, mask, weights, sample, **numbers):
    """The whole loss, by a loop, with `at` for the log-probabilities that take a gradient."""
    total = 0.0
    for t in range(len(new)):
        if mask[t]:
            mine = [u for u in range(len(new)) if mask[u] and sample[u] == sample[t]]
            mean = sum(new[u] - old[u] for u in mine) / len(mine)
            total += weights[t] * PLAIN[name](at[t], new[t], old[t], advantages[t], mean, **numbers)
    return total


@each_case
def test_value_and_gradient_are_those_of_a_loop_in_plain_python(name, numbers, ragged):
    loss, gradient, _ = run(name, *ragged, **numbers)
    new, *others = [part.tolist() for part in ragged]

    def moved(t, by):
        at = [value + by * (u == t) for u, value in enumerate(new)]
        return plain_loss(name, at, new, *others, **numbers)

    assert loss.item() == pytest.approx(plain_loss(name, new, new, *others, **numbers), abs=1e-10)
    slopes = [(moved(t, 1e-6) - moved(t, -1e-6)) / 2e-6 for t in range(len(new))]
    assert gradient.tolist() == pytest.approx(slopes, abs=1e-8)


def test_the_cases_reach_every_branch(ragged):
    stopped = {
        (name, len(numbers)): run(name, *ragged, **numbers)[2].get("clip_fraction")
        for name, numbers in CASES
        if name not in ("sapo", "reinforce")
    }
    del stopped["cispo", 0]  # no ratio is above 5
    assert all(0 < share < 1 for share in stopped.values())
    assert 0 < run("ppo", *ragged, **CASES[1][1])[2]["dual_clip_fraction"] < 1


def test_gspo_of_one_token_a_sample_is_ppo(ragged):
    *inputs, sample = ragged
    single, bounds = torch.arange(len(sample)), {"clip_low": 0.1, "clip_high": 0.3}
    gspo, ppo = run("gspo", *inputs, single, **bounds), run("ppo", *inputs, single, **bounds)
    for one, other in zip(gspo[:2], ppo[:2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
    assert gspo[2] == ppo[2]


def test_the_registry_has_each_loss_by_its_name():
    assert {name for name, _ in CASES} == set(POLICY_LOSSES) == set(PLAIN)
    assert all(f.__name__ == f"{name}_policy_loss" for name, f in POLICY_LOSSES.items())


@each_loss
def test_on_policy_the_gradient_is_reinforce(name):
    logprobs, advantages, weights = torch.randn(3, 6, dtype=torch.float64)
    mask, sample = torch.ones(6, dtype=torch.bool), torch.tensor([0, 0, 0, 1, 1, 1])
    _, gradient, metrics = run(name, logprobs, logprobs, advantages, mask, weights, sample)
    torch.testing.assert_close(gradient, -weights * advantages)
    assert metrics["ratio_max"] == 1
    assert metrics["approx_kl"] == 0
    assert metrics.get("clip_fraction", 0) == 0


@each_case
@pytest.mark.parametrize(
    "split", [[[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]], [[3], [4, 0], [2, 1]]]
)
def test_any_split_into_micro_batches_gives_the_same(name, numbers, split, ragged):
    sample, num_tokens = ragged[-1], int(ragged[3].sum())
    whole, gradient, metrics = run(name, *ragged, num_tokens=num_tokens, **numbers)
    parts, found = [], torch.zeros_like(gradient)
    for samples in split:
        rows = torch.cat([(sample == i).nonzero()[:, 0] for i in samples])
        index = torch.unique_consecutive(sample[rows], return_inverse=True)[1]
        part = [column[rows] for column in ragged[:-1]]
        parts.append(run(name, *part, index, num_tokens=num_tokens, **numbers))
        found[rows] = parts[-1][1]
    torch.testing.assert_close(sum(p[0] for p in parts), whole, atol=1e-10, rtol=0)
    torch.testing.assert_close(found, gradient, atol=1e-10, rtol=0)
    assert max(p[2].pop("ratio_max") for p in parts) == metrics.pop("ratio_max")
    for key, value in metrics.items():
        torch.testing.assert_close(sum(p[2][key] for p in parts), value, check_dtype=False)


@each_case
@pytest.mark.parametrize("junk", [0.0, math.inf, -math.inf, math.nan])
def test_what_is_masked_changes_nothing(name, numbers, junk, ragged):
    *values, mask, weights, sample = ragged
    loss, gradient, metrics = run(
        name, *(v.masked_fill(~mask, junk) for v in values), mask, weights, sample, **numbers
    )
    short, short_gradient, short_metrics = run(name, *(v[mask] for v in ragged), **numbers)
    torch.testing.assert_close(loss, short, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient[mask], short_gradient, atol=1e-12, rtol=0)
    assert (gradient[~mask] == 0).all()
    for key, value in metrics.items():
        torch.testing.assert_close(value, short_metrics[key], atol=1e-12, rtol=0)


@each_case
def test_metrics_have_no_gradient_and_neither_have_the_other_inputs(name, numbers, ragged):
    new, old, advantages, mask, weights, sample = ragged
    inputs = [t.clone().requires_grad_() for t in (new, old, advantages)]
    loss, metrics = POLICY_LOSSES[name](
        *inputs, mask, weights, num_tokens=5, sample_index=sample, **numbers
    )
    loss.backward()
    assert [t.grad is None for t in inputs] == [False, True, True]
    assert not any(value.requires_grad for value in metrics.values())


@each_loss
@pytest.mark.parametrize("length", [0, 6])
def test_an_update_without_a_token_that_trains_is_zero(name, length):
    mask, sample = torch.zeros(length, dtype=torch.bool), torch.zeros(length, dtype=torch.int64)
    values = torch.randn(3, length, dtype=torch.float64)
    loss, _, metrics = run(name, *values, mask, mask.double(), sample)
    assert loss == 0
    assert metrics.pop("ratio_max") == 1
    assert not any(metrics.values())


@each_loss
def test_a_shape_error_names_every_tensor_with_its_shape(name):
    good, bad, index = torch.zeros(3), torch.zeros(4), torch.zeros(3, dtype=torch.int64)
    loss = POLICY_LOSSES[name]
    with pytest.raises(ShapeError, match=r"logprobs \(3,\), .*advantages \(4,\), loss_mask \(3,\)"):
        loss(good, good, bad, good == 0, good, num_tokens=3, sample_index=index)
    row = good[None]
    with pytest.raises(ShapeError, match=r"logprobs \(1, 3\)"):
        loss(row, row, row, row == 0, row, num_tokens=3, sample_index=index[None])
