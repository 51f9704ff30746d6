import pytest
import torch

from verl_lab.algos.aggregate import normalisers, token_weights
from verl_lab.algos.losses import ppo_policy_loss
from verl_lab.errors import ConfigError, ShapeError

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
# Two samples, three and two tokens that train; the sixth is masked.
LOSSES = torch.tensor([-1.2, -0.75, -1.2, 1.6, 2.0, 99.0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, True, True, False])
SAMPLE = torch.tensor([0, 0, 0, 1, 1, 1])


def weights_of(mode, mask, sample, counts=None, max_tokens=4):
    num_tokens, num_sequences = counts or normalisers(mask, sample)
    return token_weights(
        mask,
        sample,
        mode=mode,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_tokens=max_tokens,
    )


@pytest.fixture
def ragged():
    """Five samples, the third with no token that trains: sample, mask, then three of values."""
    sample = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 4])
    mask = torch.tensor(
        [True, True, False, True, False, False, True, False, True, True, True, True]
    )
    return sample, mask, 0.5 * torch.randn(3, 12, dtype=torch.float64)


def loss_and_gradient(mode, sample, mask, values, counts):
    new, old, advantages = values
    leaf = new.clone().requires_grad_()
    weights = weights_of(mode, mask, sample, counts, max_tokens=8)
    loss, _ = ppo_policy_loss(leaf, old, advantages, mask, weights, num_tokens=counts[0])
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize(
    ("mode", "expected"), [*zip(MODES, [0.09, 0.375, 0.225, 0.05625], strict=True)]
)
def test_each_mode_gives_the_golden_value(mode, expected):
    assert (weights_of(mode, MASK, SAMPLE) * LOSSES).sum().item() == pytest.approx(expected)


def test_a_fully_masked_sample_does_not_count():
    mask = torch.tensor([True, True, True, False, False, False])
    assert normalisers(mask, SAMPLE) == (3, 1)
    loss = (weights_of("seq-mean-token-mean", mask, SAMPLE) * LOSSES).sum().item()
    assert loss == pytest.approx((-1.2 - 0.75 - 1.2) / 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_a_token_that_trains_weighs_nothing(mode):
    nothing = torch.zeros(6, dtype=torch.bool)
    assert normalisers(nothing, SAMPLE) == (0, 0)
    assert weights_of(mode, nothing, SAMPLE).tolist() == [0] * 6
    assert weights_of(mode, nothing[:0], SAMPLE[:0]).tolist() == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "split",
    [[[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]], [[3], [4, 0], [2, 1]], [[2], [4, 3, 1, 0]]],
)
def test_any_split_and_order_of_samples_gives_the_same_loss_and_gradient(mode, split, ragged):
    sample, mask, values = ragged
    counts = normalisers(mask, sample)
    whole, whole_grad = loss_and_gradient(mode, sample, mask, values, counts)
    total, gradient = 0.0, torch.zeros(12, dtype=torch.float64)
    for part in split:
        rows = torch.cat([(sample == i).nonzero()[:, 0] for i in part])
        local = torch.cat([torch.full((int((sample == i).sum()),), n) for n, i in enumerate(part)])
        loss, grad = loss_and_gradient(mode, local, mask[rows], values[:, rows], counts)
        total, gradient[rows] = total + loss, grad
    torch.testing.assert_close(total, whole, atol=1e-10, rtol=0)
    torch.testing.assert_close(gradient, whole_grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_added_to_a_sample_change_nothing(mode, ragged):
    sample, mask, values = ragged
    found = loss_and_gradient(mode, sample, mask, values, normalisers(mask, sample))
    sample = torch.cat([sample, torch.tensor([0, 3, 3])])
    mask = torch.cat([mask, torch.zeros(3, dtype=torch.bool)])
    values = torch.cat([values, torch.full((3, 3), torch.nan, dtype=torch.float64)], dim=1)
    padded = loss_and_gradient(mode, sample, mask, values, normalisers(mask, sample))
    torch.testing.assert_close(padded[0], found[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(padded[1][:12], found[1], atol=1e-10, rtol=0)
    assert padded[1][12:].tolist() == [0, 0, 0]


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="mode: no such choice 'mean'; use one of token-mean, "):
        weights_of("mean", MASK, SAMPLE)


def test_a_sample_index_of_another_length_is_refused():
    with pytest.raises(ShapeError, match=r"loss_mask \(6,\), sample_index \(5,\)"):
        normalisers(MASK, SAMPLE[:5])
    with pytest.raises(ShapeError, match=r"loss_mask \(6,\), sample_index \(5,\)"):
        weights_of("token-mean", MASK, SAMPLE[:5], (5, 2))
