import math

import pytest
import torch

from verl_lab.algos.returns import discounted_returns, gae, place_rewards, whiten
from verl_lab.errors import ShapeError

LENGTHS = [5, 0, 1, 7, 4, 0, 3]
"""Response tokens of seven samples, two of them without any."""


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def batch():
    """Two rows of token numbers (junk where masked), sample_index, mask with holes everywhere: in
    the middle, at the start and end of sample 3, and all of sample 4."""
    sample_index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = torch.ones(len(sample_index), dtype=torch.bool)
    mask[[2, 6, 9, 10, 12, 13, 14, 15, 16]] = False
    tokens = torch.randn(2, len(mask), dtype=torch.float64).masked_fill(~mask, torch.nan)
    return *tokens, sample_index, mask


def one(*values):
    """Tokens of a single sample, all unmasked: the values, sample_index, mask."""
    tokens = tensor(*values)
    return (
        tokens,
        torch.zeros(len(tokens), dtype=torch.int64),
        torch.ones(len(tokens), dtype=torch.bool),
    )


def test_a_reward_is_placed_on_the_last_token_that_the_policy_sampled():
    mask = torch.tensor([True, True, True, False, False])
    found = place_rewards(tensor(3, 5), torch.tensor([0, 0, 1, 1, 1]), mask)
    assert found.tolist() == [0, 3, 5, 0, 0]


def test_a_sample_without_a_sampled_token_loses_its_reward():
    mask = torch.tensor([True, False, True])
    found = place_rewards(tensor(3, 5, 7, 9), torch.tensor([0, 1, 3]), mask)
    assert found.tolist() == [3, 0, 9]


def test_rewards_are_placed_as_by_a_loop_in_plain_python(batch):
    _, _, sample_index, mask = batch
    rewards = torch.randn(len(LENGTHS), dtype=torch.float64)
    last = {}
    for t, (row, is_sampled) in enumerate(zip(sample_index.tolist(), mask.tolist(), strict=True)):
        if is_sampled:
            last[row] = t
    expected = [0.0] * len(mask)
    for row, t in last.items():
        expected[t] = rewards.tolist()[row]
    assert place_rewards(rewards, sample_index, mask).tolist() == expected


def test_a_return_is_the_reward_and_the_discounted_return_after_it():
    assert discounted_returns(*one(1, 2, 4), gamma=0.5).tolist() == [3, 4, 4]
    assert discounted_returns(*one(1, 2, 4)).tolist() == [7, 6, 4]


def test_a_return_ends_with_its_sample():
    rewards, _, mask = one(1, 2, 4, 8)
    found = discounted_returns(rewards, torch.tensor([0, 0, 2, 2]), mask)
    assert found.tolist() == [3, 2, 12, 8]


def test_a_return_passes_a_masked_token_without_a_discount():
    rewards, rows, _ = one(1, 100, 4)
    found = discounted_returns(rewards, rows, torch.tensor([True, False, True]), gamma=0.5)
    assert found.tolist() == [3, 0, 4]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_are_those_of_a_loop_in_plain_python(gamma, batch):
    rewards, _, sample_index, mask = batch
    after = {}
    expected = [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        if mask[t]:
            row = int(sample_index[t])
            after[row] = expected[t] = float(rewards[t]) + gamma * after.get(row, 0.0)
    found = discounted_returns(rewards, sample_index, mask, gamma=gamma)
    assert found.tolist() == pytest.approx(expected, abs=1e-10)


def test_gae_gives_the_golden_advantages_and_returns():
    rewards, rows, mask = one(0, 0, 1)
    advantages, returns = gae(rewards, tensor(0.5, 0.6, 0.7), rows, mask, gamma=1.0, lam=0.95)
    assert advantages.tolist() == pytest.approx([0.46575, 0.385, 0.3], abs=1e-12)
    assert returns.tolist() == pytest.approx([0.96575, 0.985, 1.0], abs=1e-12)


def test_gae_discounts_the_next_value_once_and_the_next_advantage_by_lam_too():
    rewards, rows, mask = one(1, 2)
    advantages, returns = gae(rewards, tensor(3, 4), rows, mask, gamma=0.5, lam=0.5)
    # The last: 2 - 4. The first: 1 + 0.5 * 4 - 3 + 0.25 * -2.
    assert advantages.tolist() == [-0.5, -2]
    assert returns.tolist() == [2.5, 2]


def test_a_sample_that_was_cut_goes_on_with_its_last_value():
    rewards, _, mask = one(1, 1)
    rows, last = torch.tensor([0, 2]), tensor(8, 100, 0)
    advantages, _ = gae(rewards, tensor(2, 2), rows, mask, gamma=0.5, last_values=last)
    assert advantages.tolist() == [3, -1]  # 1 + 0.5 * 8 - 2, and 1 - 2


def test_gae_carries_the_next_value_and_advantage_through_masked_tokens():
    rewards, rows, _ = one(1, math.nan, math.inf, 2)
    mask = torch.tensor([True, False, False, True])
    advantages, returns = gae(rewards, tensor(3, 9, math.nan, 4), rows, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [-0.5, 0, 0, -2]
    assert returns.tolist() == [2.5, 0, 0, 2]


def test_the_last_value_is_that_after_the_last_sampled_token_also_where_masked_ones_follow():
    rewards, rows, _ = one(1, 7)
    mask = torch.tensor([True, False])
    advantages, _ = gae(rewards, tensor(2, 7), rows, mask, gamma=0.5, last_values=tensor(8))
    assert advantages.tolist() == [3, 0]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("is_cut", [False, True])
def test_gae_is_that_of_a_loop_in_plain_python(gamma, lam, is_cut, batch):
    rewards, values, sample_index, mask = batch
    last = torch.randn(len(LENGTHS), dtype=torch.float64)
    found = gae(*batch, gamma=gamma, lam=lam, last_values=last if is_cut else None)
    after = {}
    expected = [[0.0] * len(mask), [0.0] * len(mask)]
    for t in reversed(range(len(mask))):
        if mask[t]:
            row, value = int(sample_index[t]), float(values[t])
            end = float(last[row]) if is_cut else 0.0
            next_value, next_advantage = after.get(row, (end, 0.0))
            delta = float(rewards[t]) + gamma * next_value - value
            expected[0][t] = delta + gamma * lam * next_advantage
            expected[1][t] = expected[0][t] + value
            after[row] = value, expected[0][t]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tolist() == pytest.approx(theirs, abs=1e-10)


def test_with_lam_1_and_no_discount_an_advantage_is_the_return_less_the_value(batch):
    rewards, values, sample_index, mask = batch
    advantages, returns = gae(*batch, gamma=1.0, lam=1.0)
    expected = discounted_returns(rewards, sample_index, mask)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages[mask], (expected - values)[mask])


def test_with_lam_0_an_advantage_is_the_error_of_the_next_value():
    rewards, rows, mask = one(1, 2, 3)
    advantages, _ = gae(rewards, tensor(4, 6, 8), rows, mask, gamma=0.5, lam=0.0)
    assert advantages.tolist() == [1 + 3 - 4, 2 + 4 - 6, 3 - 8]


def test_whitening_divides_by_the_unbiased_deviation_and_leaves_masked_tokens_at_zero():
    mask = torch.tensor([True, True, True, False])
    found = whiten(tensor(1, 2, 3, 4), mask)
    assert found.tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-6)


def test_whitening_without_a_shift_keeps_the_mean():
    mask = torch.tensor([True, True, True, False])
    found = whiten(tensor(2, 4, 6, math.nan), mask, shift_mean=False)
    assert found.tolist() == pytest.approx([3, 4, 5, 0], abs=1e-6)


def test_the_variance_gets_1e_8_before_its_root():
    # Mean 1e-4, variance 2e-8: divided by the root of 3e-8.
    found = whiten(tensor(0, 2e-4), torch.tensor([True, True]))
    assert found.tolist() == pytest.approx([-1 / 3**0.5, 1 / 3**0.5], rel=1e-9)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_is_that_of_a_loop_in_plain_python(shift_mean, batch):
    values, _, _, mask = batch
    kept = [v for v, is_sampled in zip(values.tolist(), mask.tolist(), strict=True) if is_sampled]
    mean = sum(kept) / len(kept)
    variance = sum((v - mean) ** 2 for v in kept) / (len(kept) - 1)
    expected = [
        ((v - mean) / math.sqrt(variance + 1e-8) + (0 if shift_mean else mean)) if m else 0.0
        for v, m in zip(values.tolist(), mask.tolist(), strict=True)
    ]
    found = whiten(values, mask, shift_mean=shift_mean)
    assert found.tolist() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("kept", [[0.7] * 11, [1000.1] * 3, [5.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_whiten_to_exactly_zero_or_stay_without_a_shift(kept, dtype):
    values = torch.tensor([*kept, math.nan], dtype=dtype)
    mask = ~values.isnan()
    assert whiten(values, mask).tolist() == [0.0] * len(values)
    stayed = whiten(values, mask, shift_mean=False)[mask]
    torch.testing.assert_close(stayed, values[mask])


def test_nothing_to_whiten_gives_zeros():
    assert whiten(tensor(1, math.nan), torch.tensor([False, False])).tolist() == [0, 0]


def everything(rewards, values, sample_index, mask):
    """What each function makes of a batch, [T] each."""
    final = torch.linspace(-1, 1, len(LENGTHS), dtype=rewards.dtype)
    return torch.stack(
        [
            place_rewards(final, sample_index, mask),
            discounted_returns(rewards, sample_index, mask, gamma=0.9),
            *gae(rewards, values, sample_index, mask, gamma=0.9, last_values=final),
            whiten(values, mask),
        ]
    )


@pytest.mark.parametrize("junk", [0.0, math.inf, -math.inf, math.nan])
def test_what_masked_tokens_hold_changes_nothing_and_their_results_are_zero(junk, batch):
    rewards, values, sample_index, mask = batch
    found = everything(
        rewards.masked_fill(~mask, junk), values.masked_fill(~mask, junk), sample_index, mask
    )
    torch.testing.assert_close(found, everything(*batch), atol=0, rtol=0)
    assert (found[:, ~mask] == 0).all()


def test_tokens_that_are_masked_may_as_well_not_be_there(batch):
    mask = batch[-1]
    short = everything(*(part[mask] for part in batch))
    torch.testing.assert_close(everything(*batch)[:, mask], short, atol=0, rtol=0)


def test_the_samples_beside_it_change_nothing_in_a_sample(batch):
    whole = gae(*batch)
    for row in (0, 2, 3, 6):
        here = batch[2] == row
        alone = gae(*(part[here] for part in batch))
        for mine, among in zip(alone, whole, strict=True):
            torch.testing.assert_close(mine, among[here], atol=0, rtol=0)


def test_samples_in_another_order_have_the_same_returns_in_that_order(batch):
    rewards, values, sample_index, mask = batch
    order = torch.randperm(len(LENGTHS))
    tokens = torch.cat([(sample_index == row).nonzero()[:, 0] for row in order])
    rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)[order])
    moved = gae(rewards[tokens], values[tokens], rows, mask[tokens])
    for mine, straight in zip(moved, gae(*batch), strict=True):
        torch.testing.assert_close(mine, straight[tokens], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_kept(dtype, batch):
    rewards, values, *where = batch
    assert everything(rewards.to(dtype), values.to(dtype), *where).dtype == dtype


def test_no_tokens_at_all_are_no_special_case():
    nothing, rows = tensor(), torch.zeros(0, dtype=torch.int64)
    assert everything(nothing, nothing, rows, rows.bool()).shape == (5, 0)


def test_tokens_out_of_order_are_refused():
    tokens, _, mask = one(1, 2, 3, 4)
    rows = torch.tensor([0, 1, 1, 0])
    for function in (place_rewards, discounted_returns):
        with pytest.raises(ShapeError, match="must not fall, but goes from 1 to 0 after token 2; "):
            function(tokens, rows, mask)
    with pytest.raises(ShapeError, match="must not fall"):
        gae(tokens, tokens, rows, mask)


@pytest.mark.parametrize("given", [(2,), (3, 1)])
def test_values_of_samples_that_do_not_fit_are_refused(given):
    tokens, _, mask = one(1, 2, 3)
    rows, wrong = torch.arange(3), torch.zeros(given)
    with pytest.raises(ShapeError, match=r"rewards: .* for each of 3 samples, got \("):
        place_rewards(wrong, rows, mask)
    with pytest.raises(ShapeError, match=r"last_values: .* for each of 3 samples, got \("):
        gae(tokens, tokens, rows, mask, last_values=wrong)


def test_shapes_that_differ_are_named():
    tokens, rows, mask = one(1, 2, 3)
    with pytest.raises(ShapeError, match=r"token_rewards \(3,\), values \(2,\)"):
        gae(tokens, tokens[:2], rows, mask)
    with pytest.raises(ShapeError, match=r"token_rewards \(2,\)"):
        discounted_returns(tokens[:2], rows, mask)
    with pytest.raises(ShapeError, match=r"sample_index \(2,\), mask \(3,\)"):
        place_rewards(tensor(1), rows[:2], mask)
    with pytest.raises(ShapeError, match=r"values \(2,\), mask \(3,\)"):
        whiten(tokens[:2], mask)
