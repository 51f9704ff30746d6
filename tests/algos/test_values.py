import math

import pytest
import torch

from verl_lab.algos.values import explained_variance, value_loss
from verl_lab.errors import ShapeError


def of_token(value, old, target, clip):
    """The loss of a single token and its slope."""
    values, one = torch.tensor([value], requires_grad=True), torch.ones(1)
    loss, _ = value_loss(values, one * old, one * target, one.bool(), one, num_tokens=1, clip=clip)
    loss.backward()
    return loss.item(), values.grad.item()


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "expected", "slope"),
    [
        (1.0, 0.0, 3.0, None, 2.0, -2.0),  # (1 - 3)² / 2
        (1.0, 0.0, 3.0, 2.0, 2.0, -2.0),  # moved by less than the bound
        (1.0, 0.0, 3.0, 0.5, 3.125, 0.0),  # moved towards the return: held at 0.5
        (-1.0, 0.0, -3.0, 0.5, 3.125, 0.0),
        (1.0, 0.0, -3.0, 0.5, 8.0, 4.0),  # moved away: not held back
    ],
)
def test_a_token_loss_is_the_one_worked_out_by_hand(value, old, target, clip, expected, slope):
    assert of_token(value, old, target, clip) == (expected, slope)


@pytest.fixture
def batch():
    """Twelve tokens, junk where masked: values, old values, returns, mask, weights."""
    mask = torch.tensor([True, True, False, True, True, True, False, True, True, True, True, True])
    values = torch.randn(3, 12, dtype=torch.float64).masked_fill(~mask, torch.nan)
    return (*values, mask, torch.where(mask, torch.rand(12, dtype=torch.float64), 0.0))


def run(values, *others, num_tokens=10, clip=0.4):
    leaf = values.clone().requires_grad_()
    loss, metrics = value_loss(leaf, *others, num_tokens=num_tokens, clip=clip)
    loss.backward()
    return loss.detach(), leaf.grad, metrics


def plain_loss(values, old, returns, mask, weights, clip):
    total = 0.0
    for v, o, r, m, w in zip(values, old, returns, mask, weights, strict=True):
        if m:
            held = v if clip is None else min(max(v, o - clip), o + clip)
            total += 0.5 * w * max((v - r) ** 2, (held - r) ** 2)
    return total


@pytest.mark.parametrize("clip", [None, 0.4])
def test_value_and_gradient_are_those_of_a_loop_in_plain_python(clip, batch):
    loss, gradient, _ = run(*batch, clip=clip)
    values, *others = [part.tolist() for part in batch]

    def moved(t, by):
        at = [value + by * (u == t) for u, value in enumerate(values)]
        return plain_loss(at, *others, clip)

    assert loss.item() == pytest.approx(plain_loss(values, *others, clip), abs=1e-10)
    slopes = [(moved(t, 1e-6) - moved(t, -1e-6)) / 2e-6 for t in range(12)]
    assert gradient.tolist() == pytest.approx(slopes, abs=1e-8)


def test_metrics_by_hand():
    values = torch.tensor([1.0, 1.0, -1.0, 5.0])
    returns, mask = torch.tensor([3.0, -3.0, -3.0, 0.0]), torch.tensor([True, True, True, False])
    knobs = {"num_tokens": 4, "clip": 0.5}
    _, metrics = value_loss(values, 0 * values, returns, mask, mask.float(), **knobs)
    assert metrics["clip_fraction"].item() == 2 / 4  # the second moved away from its return
    assert metrics["mean"].item() == 1 / 4


def test_without_a_clip_nothing_is_clipped(batch):
    assert run(*batch, clip=None)[2]["clip_fraction"] == 0
    assert 0 < run(*batch)[2]["clip_fraction"] < 1


@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("split", [[4, 8], [0, 1, 11], [3, 3, 6]])
def test_any_split_into_micro_batches_gives_the_same(clip, split, batch):
    loss, gradient, metrics = run(*batch, clip=clip)
    columns = zip(*(torch.split(column, split) for column in batch), strict=True)
    parts = [run(*column, clip=clip) for column in columns]
    torch.testing.assert_close(sum(p[0] for p in parts), loss, atol=1e-10, rtol=0)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), gradient, atol=1e-10, rtol=0)
    for key, value in metrics.items():
        torch.testing.assert_close(sum(p[2][key] for p in parts), value)


@pytest.mark.parametrize("junk", [0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("clip", [None, 0.4])
def test_what_is_masked_changes_nothing(junk, clip, batch):
    *values, mask, weights = batch
    loss, gradient, metrics = run(*(v.masked_fill(~mask, junk) for v in values), mask, weights)
    short, short_gradient, short_metrics = run(*(column[mask] for column in batch))
    torch.testing.assert_close(loss, short, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient[mask], short_gradient, atol=1e-12, rtol=0)
    assert gradient[~mask].tolist() == [0, 0]
    torch.testing.assert_close(metrics, short_metrics)


def test_only_the_values_get_a_gradient(batch):
    *values, mask, weights = batch
    inputs = [v.clone().requires_grad_() for v in values]
    loss, metrics = value_loss(*inputs, mask, weights, num_tokens=10, clip=0.4)
    loss.backward()
    assert [t.grad is None for t in inputs] == [False, True, True]
    assert not any(value.requires_grad for value in metrics.values())


def test_an_update_without_a_token_that_trains_is_zero():
    junk, none = torch.full((3,), torch.nan), torch.zeros(3, dtype=torch.bool)
    loss, gradient, metrics = run(junk, junk, junk, none, none.float(), num_tokens=0)
    assert loss == 0
    assert gradient.tolist() == [0, 0, 0]
    assert not any(metrics.values())


def test_a_shape_error_names_every_tensor_with_its_shape():
    good, bad = torch.zeros(3), torch.zeros(4)
    with pytest.raises(ShapeError, match=r"values \(3,\), old_values \(4,\), returns \(3,\)"):
        value_loss(good, bad, good, good == 0, good, num_tokens=3, clip=None)
    with pytest.raises(ShapeError, match=r"values \(3,\), returns \(4,\), mask \(3,\)"):
        explained_variance(good, bad, good == 0)


# --- explained variance


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3, 4], 1.0),
        ([11, 12, 13, 14], 1.0),  # a constant error is none of the variance
        ([7, 7, 7, 7], 0.0),
        ([4, 3, 2, 1], -3.0),  # errors -3, -1, 1, 3: variance 4 times that of the returns
        ([1, 2, 3, 3], 0.85),  # errors 0, 0, 0, 1: 1 - 0.1875 / 1.25
    ],
)
def test_explained_variance_by_hand(values, expected):
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan])
    mask = torch.tensor([True] * 4 + [False])
    values = torch.tensor([*values, math.inf])
    assert explained_variance(values, returns, mask).item() == pytest.approx(expected)


@pytest.mark.parametrize("returns", [[], [3.0], [0.1] * 11, [0.7] * 3])
def test_returns_that_do_not_vary_have_no_variance_to_explain(returns):
    returns = torch.tensor(returns)
    values, mask = torch.randn(len(returns)), torch.ones(len(returns), dtype=torch.bool)
    assert explained_variance(values, returns, mask).item() == 0


def test_explained_variance_has_no_gradient():
    values, returns = torch.randn(2, 4, requires_grad=True).unbind()
    assert not explained_variance(values, returns, torch.ones(4, dtype=torch.bool)).requires_grad
