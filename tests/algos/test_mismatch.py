import math

import pytest
import torch

from verl_lab.algos.mismatch import mismatch
from verl_lab.errors import ShapeError

AGREE = {"mismatch_kl": 0, "mismatch_max": 1, "ess": 1, "chi2": 0, "ppl_ratio": 1}


def test_mismatch_of_processes_that_agree_is_nothing():
    logprobs, mask = torch.randn(5), torch.tensor([True] * 4 + [False])
    found = mismatch(logprobs, logprobs, mask)
    assert {name: value.item() for name, value in found.items()} == AGREE


def test_mismatch_by_hand():
    old = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.6, 1.0]).log()
    rollout = torch.tensor([0.25, 0.4, 0.1, 0.2, 0.5, float("nan")]).log()
    found = mismatch(old, rollout, torch.tensor([True] * 5 + [False]))
    # rho = 2, 1, 3, 1, 1.2; k3(rollout || old) = rho - 1 - ln rho
    expected = sum(r - 1 - math.log(r) for r in (2, 1, 3, 1, 1.2)) / 5
    assert found["mismatch_kl"].item() == pytest.approx(expected, rel=1e-5)
    assert found["mismatch_max"].item() == pytest.approx(3, rel=1e-5)
    assert found["ess"].item() == pytest.approx(8.2**2 / (5 * (4 + 1 + 9 + 1 + 1.44)), rel=1e-5)
    assert found["chi2"].item() == pytest.approx(16.44 / 5 - 1, rel=1e-5)
    # The trainer finds the tokens likelier by the geometric mean of rho, so is less perplexed.
    assert found["ppl_ratio"].item() == pytest.approx((2 * 1 * 3 * 1 * 1.2) ** -0.2, rel=1e-5)


def test_a_direction_is_as_far_as_its_opposite_for_the_largest():
    far, mask = torch.tensor([-1.0, -3.0]), torch.ones(2, dtype=torch.bool)
    near = torch.tensor([-1.0, -2.0])
    for old, rollout in ((far, near), (near, far)):
        assert mismatch(old, rollout, mask)["mismatch_max"].item() == pytest.approx(math.e)


def test_a_small_mismatch_is_not_lost_to_rounding():
    rollout, mask = torch.tensor([-3.0, -2.0]), torch.ones(2, dtype=torch.bool)
    found = mismatch(rollout + torch.tensor([1e-4, -1e-4]), rollout, mask)
    assert found["mismatch_kl"].item() == pytest.approx(5e-9, rel=0.01)  # d^2 / 2
    assert found["chi2"].item() == pytest.approx(2e-8, rel=0.1)  # cosh(2d) - 1


def test_over_all_tokens_chi2_is_the_divergence():
    old, rollout = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    mask = torch.ones(1, dtype=torch.bool)
    found = [mismatch(o[None], r[None], mask)["chi2"] for o, r in zip(old, rollout, strict=True)]
    exact = ((old.exp() - rollout.exp()).square() / rollout.exp()).sum()
    torch.testing.assert_close((rollout.exp() * torch.stack(found)).sum(), exact)


def test_policies_that_are_far_apart_stay_finite():
    old, rollout = torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])
    found = mismatch(old, rollout, torch.ones(2, dtype=torch.bool))
    assert found["mismatch_kl"].item() == 10
    assert found["mismatch_max"].item() == pytest.approx(math.exp(20), rel=1e-5)
    assert found["ess"].item() == pytest.approx(0.5)  # one sample holds all the weight


def test_nothing_unmasked_is_no_mismatch():
    junk, mask = torch.full((2,), torch.nan), torch.zeros(2, dtype=torch.bool)
    found = mismatch(junk, junk, mask)
    assert {name: value.item() for name, value in found.items()} == AGREE


def test_gradients_do_not_pass():
    old, rollout = torch.randn(2, 3, requires_grad=True).unbind()
    found = mismatch(old, rollout, torch.ones(3, dtype=torch.bool))
    assert not any(value.requires_grad for value in found.values())


def test_a_shape_error_names_every_tensor_with_its_shape():
    with pytest.raises(ShapeError, match=r"old_logprobs \(3,\), rollout_logprobs \(2,\)"):
        mismatch(torch.zeros(3), torch.zeros(2), torch.ones(3, dtype=torch.bool))
