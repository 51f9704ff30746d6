import math
from typing import get_args

import pytest
import torch

from verl_lab.algos.preference import (
    PreferenceLoss,
    kto_loss,
    pair_accuracy,
    preference_loss,
    reward_model_loss,
    sample_means,
    sample_sums,
)
from verl_lab.errors import ConfigError, ShapeError

KINDS = list(get_args(PreferenceLoss))
each_kind = pytest.mark.parametrize("kind", KINDS)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def softplus(x):
    """-log sigmoid(-x)."""
    return math.log1p(math.exp(x))


def of_pair(h, **knobs):
    """The loss of a pair whose h is given, and its slope by h."""
    chosen = tensor(h - 7.0).requires_grad_()
    loss = preference_loss(chosen, tensor(-9.0), tensor(-8.0), tensor(-10.0), **knobs)
    loss.sum().backward()
    return loss.item(), chosen.grad.item()


@pytest.mark.parametrize(
    ("kind", "e", "h", "expected", "slope"),
    [
        ("dpo", 0.0, 0.0, math.log(2), -0.25),  # beta / 2
        ("dpo", 0.0, 2.0, 0.313262, -0.134471),  # softplus(-1), beta (sigmoid(1) - 1)
        ("dpo", 0.0, -2.0, 1.313262, -0.365529),
        ("dpo", 0.1, 2.0, 0.413262, -0.084471),  # 0.9 * 0.313262 + 0.1 * 1.313262
        ("rdpo", 0.0, 2.0, 0.313262, -0.134471),
        ("rdpo", 0.1, 2.0, 0.188262, -0.196971),  # (0.9 * 0.313262 - 0.1 * 1.313262) / 0.8
        ("ipo", 0.0, 1.5, 0.25, 1.0),  # (1.5 - 1)², 2 (1.5 - 1)
        ("ipo", 0.0, -1.0, 4.0, -4.0),
        ("hinge", 0.0, 1.0, 0.5, -0.5),
        ("hinge", 0.0, -2.0, 2.0, -0.5),
        ("hinge", 0.0, 3.0, 0.0, 0.0),
    ],
)
def test_each_kind_gives_the_value_and_slope_worked_out_by_hand(kind, e, h, expected, slope):
    found = of_pair(h, kind=kind, beta=0.5, label_smoothing=e)
    assert found == pytest.approx((expected, slope), abs=1e-6)


@each_kind
def test_losses_are_those_of_a_loop_in_plain_python(kind):
    pairs = torch.randn(4, 9, dtype=torch.float64)
    beta, e = 0.7, 0.2 if kind in ("dpo", "rdpo") else 0.0
    expected = []
    for chosen, rejected, ref_chosen, ref_rejected in pairs.T.tolist():
        x = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        expected.append(
            {
                "dpo": (1 - e) * softplus(-x) + e * softplus(x),
                "rdpo": ((1 - e) * softplus(-x) - e * softplus(x)) / (1 - 2 * e),
                "ipo": (x / beta - 1 / (2 * beta)) ** 2,
                "hinge": max(0.0, 1 - x),
            }[kind]
        )
    found = preference_loss(*pairs, kind=kind, beta=beta, label_smoothing=e)
    assert found.tolist() == pytest.approx(expected, abs=1e-10)


@each_kind
def test_gradients_are_those_of_finite_differences(kind):
    pairs = torch.randn(4, 5, dtype=torch.float64)
    chosen, rejected = (p.clone().requires_grad_() for p in pairs[:2])
    assert torch.autograd.gradcheck(
        lambda c, r: preference_loss(c, r, *pairs[2:], kind=kind, beta=0.7), (chosen, rejected)
    )


def test_rdpo_expects_the_loss_of_true_labels_whatever_share_is_flipped():
    pairs, e = torch.randn(4, 5, dtype=torch.float64), 0.3
    flipped = pairs[[1, 0, 3, 2]]
    knobs = {"kind": "rdpo", "beta": 0.5, "label_smoothing": e}
    expected = (1 - e) * preference_loss(*pairs, **knobs) + e * preference_loss(*flipped, **knobs)
    torch.testing.assert_close(expected, preference_loss(*pairs, kind="dpo", beta=0.5))


def test_logprobs_that_are_far_apart_stay_finite():
    assert of_pair(-5000.0, kind="dpo", beta=1.0) == (5000, -1)
    assert of_pair(5000.0, kind="dpo", beta=1.0) == (0, 0)


@each_kind
def test_the_reference_gets_no_gradient(kind):
    inputs = [tensor(1.0, -2.0).requires_grad_() for _ in range(4)]
    preference_loss(*inputs, kind=kind, beta=0.5).sum().backward()
    assert [t.grad is None for t in inputs] == [False, False, True, True]


@pytest.mark.parametrize("kind", ["dpo", "rdpo"])
@pytest.mark.parametrize("e", [-0.1, 0.5, 0.9, math.nan])
def test_a_label_smoothing_that_makes_no_sense_is_refused(kind, e):
    with pytest.raises(ConfigError, match=f"label_smoothing: must be .* below 0.5, got {e}; with"):
        of_pair(0.0, kind=kind, beta=0.5, label_smoothing=e)


@pytest.mark.parametrize("kind", ["ipo", "hinge"])
def test_a_label_smoothing_that_would_be_ignored_is_refused(kind):
    with pytest.raises(ConfigError, match=f"label_smoothing: {kind} has none, got 0.1; set it"):
        of_pair(0.0, kind=kind, beta=0.5, label_smoothing=0.1)


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="kind: no such choice 'kto'; use one of dpo, ipo, "):
        of_pair(0.0, kind="kto", beta=0.5)


def test_pairs_that_torch_would_broadcast_are_refused():
    with pytest.raises(ShapeError, match=r"chosen \(3,\), rejected \(1,\)"):
        preference_loss(*[torch.zeros(n) for n in (3, 1, 3, 3)], kind="dpo", beta=0.5)


# --- KTO


def of_sample(h, is_chosen, kl=0.0, **weights):
    """The loss of a sample whose h is given, and its slope."""
    logprobs = tensor(h - 5.0).requires_grad_()
    found = kto_loss(
        logprobs, tensor(-5.0), torch.tensor([is_chosen]), torch.tensor(kl), beta=0.5, **weights
    )
    found.sum().backward()
    return found.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("h", "is_chosen", "kl", "expected", "slope"),
    [
        (0.0, True, 0.0, 0.5, -0.125),  # beta sigmoid' = 0.5 * 0.25
        (0.0, False, 0.0, 0.5, 0.125),
        (2.0, True, 0.0, 0.268941, -0.098306),  # 1 - sigmoid(1)
        (2.0, False, 0.0, 0.731059, 0.098306),
        (2.0, True, 2.0, 0.5, -0.125),  # measured from the kl
        (2.0, False, 4.0, 0.268941, 0.098306),
        (2.0, True, -3.0, 0.268941, -0.098306),  # an estimate below 0 is noise
    ],
)
def test_kto_by_hand(h, is_chosen, kl, expected, slope):
    assert of_sample(h, is_chosen, kl) == pytest.approx((expected, slope), abs=1e-6)


def test_kto_weighs_good_and_bad_apart():
    weights = {"desirable_weight": 3.0, "undesirable_weight": 0.5}
    assert of_sample(0.0, True, **weights)[0] == 1.5
    assert of_sample(0.0, False, **weights)[0] == 0.25


def test_kto_is_that_of_a_loop_in_plain_python():
    logprobs, reference = torch.randn(2, 9, dtype=torch.float64)
    is_chosen, kl = torch.rand(9) < 0.5, tensor(0.3)[0]
    expected = []
    for mine, theirs, good in zip(logprobs, reference, is_chosen, strict=True):
        gain = 0.7 * ((mine - theirs).item() - 0.3) * (1 if good else -1)
        expected.append((2.0 if good else 1.5) * (1 - 1 / (1 + math.exp(-gain))))
    weights = {"desirable_weight": 2.0, "undesirable_weight": 1.5}

    def loss(x):
        return kto_loss(x, reference, is_chosen, kl, beta=0.7, **weights)

    assert loss(logprobs).tolist() == pytest.approx(expected, abs=1e-10)
    assert torch.autograd.gradcheck(loss, logprobs.requires_grad_())


def test_kto_trains_neither_the_reference_nor_the_kl():
    logprobs, reference = (tensor(-1.0, -2.0).requires_grad_() for _ in range(2))
    kl = torch.tensor(0.5, requires_grad=True)
    kto_loss(logprobs, reference, torch.tensor([True, False]), kl, beta=0.5).sum().backward()
    assert [t.grad is None for t in (logprobs, reference, kl)] == [False, True, True]


def test_a_kl_for_each_sample_is_refused():
    one = torch.zeros(3)
    with pytest.raises(ShapeError, match=r"kl: must be a scalar, got \(3,\); take the mean"):
        kto_loss(one, one, one == 0, one, beta=0.5)


# --- reward models


def test_the_golden_losses_of_a_reward_model():
    chosen, rejected = tensor(1.5).requires_grad_(), tensor(0.5)
    plain = reward_model_loss(chosen, rejected)
    assert plain.item() == pytest.approx(0.313262, abs=1e-6)
    margin = reward_model_loss(chosen, rejected, tensor(0.3))
    assert margin.item() == pytest.approx(0.403186, abs=1e-6)
    centred = reward_model_loss(chosen, rejected, centre_coef=0.01)
    assert (centred - plain).item() == pytest.approx(0.04)
    margin.backward()
    assert chosen.grad.item() == pytest.approx(-0.331812, abs=1e-6)  # sigmoid(0.7) - 1


def test_a_reward_models_loss_is_that_of_a_loop_in_plain_python():
    chosen, rejected, margin = torch.randn(3, 9, dtype=torch.float64)
    expected = [
        softplus(-(c - r - m)) + 0.1 * (c + r) ** 2
        for c, r, m in zip(chosen.tolist(), rejected.tolist(), margin.tolist(), strict=True)
    ]

    def loss(c, r):
        return reward_model_loss(c, r, margin, centre_coef=0.1)

    assert loss(chosen, rejected).tolist() == pytest.approx(expected, abs=1e-10)
    assert torch.autograd.gradcheck(loss, (chosen.requires_grad_(), rejected.requires_grad_()))


def test_one_margin_is_not_taken_for_all_pairs():
    with pytest.raises(ShapeError, match=r"chosen \(3,\), margin \(1,\)"):
        reward_model_loss(torch.zeros(3), torch.zeros(3), torch.zeros(1))


def test_a_tie_is_half_right():
    chosen, rejected = tensor(1, 0, 2, 2).requires_grad_(), tensor(0, 1, 2, 1)
    found = pair_accuracy(chosen, rejected)
    assert found.item() == (1 + 0 + 0.5 + 1) / 4
    assert not found.requires_grad
    assert pair_accuracy(tensor(), tensor()).item() == 0


# --- sums over samples

VALUES = tensor(1, 2, 4, 8, 16, math.nan)
MASK = torch.tensor([True, True, False, True, True, False])
SAMPLE = torch.tensor([0, 0, 0, 2, 2, 3])


def test_sums_and_means_are_over_the_unmasked_tokens_of_each_sample():
    assert sample_sums(VALUES, MASK, SAMPLE, 5).tolist() == [3, 0, 24, 0, 0]
    assert sample_means(VALUES, MASK, SAMPLE, 5).tolist() == [1.5, 0, 12, 0, 0]


def test_sums_and_means_give_each_unmasked_token_its_gradient():
    upstream = tensor(1, 2, 3, 4, 5)
    for function, expected in (
        (sample_sums, [1, 1, 0, 3, 3, 0]),
        (sample_means, [0.5, 0.5, 0, 1.5, 1.5, 0]),
    ):
        values = VALUES.clone().requires_grad_()
        (upstream * function(values, MASK, SAMPLE, 5)).sum().backward()
        assert values.grad.tolist() == expected


def test_samples_without_tokens_are_zero():
    none = torch.zeros(0)
    assert sample_means(none, none == 0, none.long(), 2).tolist() == [0, 0]


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ShapeError, match=r"token_values \(6,\), mask \(5,\)"):
        sample_sums(VALUES, MASK[:5], SAMPLE, 4)
