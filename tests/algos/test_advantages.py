import math
import statistics

import pytest
import torch

from verl_lab.algos.advantages import (
    constant_groups,
    constant_rows,
    gdpo_advantages,
    group_advantages,
    pass_at_k_advantages,
)
from verl_lab.errors import ConfigError, RewardError, ShapeError

BASELINES = ["group_mean", "leave_one_out", "length_weighted", "greedy", "none"]
SCALES = ["group_std", "batch_std", "whiten", "none"]


def advantages(rewards, groups=None, **knobs):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else torch.tensor(groups)
    return group_advantages(rewards, ids, **knobs).tolist()


@pytest.fixture
def scored():
    """Rewards, ids, lengths and greedy rewards of 13 samples in groups that are not side by side:
    of 5, 4, 3 with equal rewards, and 1."""
    ids = torch.tensor([9, 2, 9, 4, 2, 9, 4, 2, 7, 9, 4, 2, 9])
    rewards = torch.randn(13, dtype=torch.float64).masked_fill(ids == 4, 0.7)
    greedy = torch.randn(10, dtype=torch.float64)[ids]
    return rewards, ids, torch.randint(1, 20, (13,)), greedy


def members(ids):
    """The rows of each group."""
    groups = {}
    for row, group_id in enumerate(ids.tolist()):
        groups.setdefault(group_id, []).append(row)
    return groups.values()


def plain_baseline(name, rewards, lengths, greedy, rows, row):
    others = [rewards[j] for j in rows if j != row]
    if name == "group_mean":
        return sum(rewards[j] for j in rows) / len(rows)
    if name == "leave_one_out":
        return sum(others) / len(others) if others else rewards[row]
    if name == "length_weighted":
        return sum(lengths[j] * rewards[j] for j in rows) / sum(lengths[j] for j in rows)
    return greedy[row] if name == "greedy" else 0.0


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_advantages_are_those_of_a_loop_in_plain_python(baseline, scale, scored):
    rewards, _, lengths, greedy = (part.tolist() for part in scored)
    expected = [0.0] * len(rewards)
    for rows in members(scored[1]):
        own = [rewards[j] for j in rows]
        is_constant = min(own) == max(own)
        for row in rows:
            divisor = 1.0
            if scale == "group_std" and not is_constant:
                divisor = statistics.stdev(own) + 1e-6
            elif scale == "batch_std":
                divisor = statistics.stdev(rewards) + 1e-6
            if not is_constant or baseline in ("greedy", "none"):
                less = plain_baseline(baseline, rewards, lengths, greedy, rows, row)
                expected[row] = (rewards[row] - less) / divisor
    found = group_advantages(
        *scored[:2], baseline=baseline, scale=scale, lengths=scored[2], greedy_rewards=scored[3]
    )
    assert found.tolist() == pytest.approx(expected, abs=1e-10)


def test_grpo_divides_by_the_unbiased_deviation():
    a = 0.866024  # 0.5 / (0.57735 + 1e-6)
    assert advantages([1, 0, 0, 1]) == pytest.approx([a, -a, -a, a], abs=1e-6)


def test_dr_grpo_subtracts_the_mean_only():
    assert advantages([1, 0, 0, 1], scale="none") == [0.5, -0.5, -0.5, 0.5]


def test_rloo_compares_with_the_mean_of_the_others():
    found = advantages([1, 0, 0, 0], baseline="leave_one_out", scale="none")
    assert found == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], rel=1e-12)


def test_rloo_is_dr_grpo_times_n_over_n_minus_1():
    rewards = torch.randn(5).tolist()
    rloo = advantages(rewards, baseline="leave_one_out", scale="none")
    plain = advantages(rewards, scale="none")
    assert rloo == pytest.approx([a * 5 / 4 for a in plain])


def test_opo_subtracts_the_mean_weighted_by_length():
    lengths = torch.tensor([1, 3, 2])  # (1 * 6 + 3 * 2 + 2 * 0) / 6 = 2
    found = advantages([6, 2, 0], baseline="length_weighted", scale="none", lengths=lengths)
    assert found == [4, 0, -2]


def test_opo_of_equally_long_responses_is_dr_grpo():
    rewards, lengths = torch.randn(5).tolist(), torch.full((5,), 7)
    found = advantages(rewards, baseline="length_weighted", scale="none", lengths=lengths)
    assert found == pytest.approx(advantages(rewards, scale="none"))


def test_opo_gives_a_group_without_any_token_finite_advantages():
    lengths = torch.tensor([0, 0, 1, 3])
    found = advantages(
        [1, 0, 4, 0], [0, 0, 1, 1], baseline="length_weighted", scale="none", lengths=lengths
    )
    assert found == [1, 0, 3, -1]


def test_remax_subtracts_the_reward_of_the_greedy_response_also_from_equal_rewards():
    greedy = torch.tensor([0.5, 0.5, 1, 1, 2])
    found = advantages(
        [1, 0, 3, 3, 5], [0, 0, 1, 1, 2], baseline="greedy", scale="none", greedy_rewards=greedy
    )
    assert found == [0.5, -0.5, 2, 2, 3]


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
def test_whitening_is_left_to_the_tokens(baseline):
    rewards = torch.randn(6).tolist()
    plain = advantages(rewards, baseline=baseline, scale="none")
    assert advantages(rewards, baseline=baseline, scale="whiten") == plain


@pytest.mark.parametrize(
    ("baseline", "needed"), [("length_weighted", "lengths"), ("greedy", "greedy_rewards")]
)
def test_what_a_baseline_needs_is_asked_for_and_has_to_fit(baseline, needed):
    with pytest.raises(ConfigError, match=f"baseline={baseline}: needs {needed}; pass them, or "):
        advantages([1, 0], baseline=baseline)
    with pytest.raises(ShapeError, match=rf"baseline={baseline}: {needed} \(3,\) do not fit rew"):
        advantages([1, 0], baseline=baseline, **{needed: torch.ones(3)})


def test_a_greedy_reward_that_is_no_number_is_refused():
    greedy = torch.tensor([1.0, math.nan])
    with pytest.raises(RewardError, match="greedy_rewards: 1 of 2 are not finite, the first nan"):
        advantages([1, 0], baseline="greedy", greedy_rewards=greedy)
    advantages([1, 0], baseline="group_mean", greedy_rewards=greedy)  # not asked for


def test_batch_std_is_that_of_all_rewards():
    found = advantages([1, 0, 3, 2], [0, 0, 1, 1], scale="batch_std")
    std = torch.tensor([1.0, 0, 3, 2]).std().item()
    assert found == pytest.approx([0.5 / std, -0.5 / std, 0.5 / std, -0.5 / std], rel=1e-5)


def test_without_a_baseline_the_reward_itself_counts():
    assert advantages([1, 0, 2], baseline="none", scale="none") == [1, 0, 2]


@pytest.mark.parametrize("rewards", [[1000.1] * 3, [0.7] * 11, [0.0] * 4, [5.0]])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "length_weighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_gets_exactly_zero(rewards, baseline, dtype):
    ids = torch.zeros(len(rewards), dtype=torch.int64)
    lengths = torch.arange(len(rewards)) + 3
    given = torch.tensor(rewards, dtype=dtype)
    found = group_advantages(given, ids, baseline=baseline, lengths=lengths)
    assert found.tolist() == [0.0] * len(rewards)
    assert found.dtype == dtype


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
def test_without_a_baseline_equal_rewards_are_not_blown_up(scale):
    assert advantages([0.7] * 3, baseline="none", scale=scale) == [0.7] * 3
    assert advantages([5.0], baseline="none", scale=scale) == [5.0]


def test_without_a_baseline_a_group_is_still_divided_by_its_deviation():
    found = advantages([1, 0, 7], [0, 0, 1], baseline="none")
    assert found == pytest.approx([2**0.5, 0, 7], rel=1e-5)  # the std of 1, 0 is sqrt(1/2)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_a_group_of_one_gets_zero_beside_others(baseline):
    assert advantages([3, 1, 0], [7, 2, 2], baseline=baseline)[0] == 0


def test_groups_go_by_id_and_not_by_position():
    # Group 3 holds 1, 0, 0 (mean 1/3) and group 8 holds 5, 7, 9 (mean 7).
    found = advantages([1, 5, 0, 7, 0, 9], [3, 8, 3, 8, 3, 8], scale="none")
    assert found == pytest.approx([2 / 3, -2, -1 / 3, 0, -1 / 3, 2])


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_permuting_samples_with_their_ids_permutes_the_advantages(baseline, scale, scored):
    def of(order):
        rewards, ids, lengths, greedy = (part[order] for part in scored)
        return group_advantages(
            rewards, ids, baseline=baseline, scale=scale, lengths=lengths, greedy_rewards=greedy
        )

    order = torch.randperm(13)
    torch.testing.assert_close(of(order), of(torch.arange(13))[order], atol=1e-12, rtol=0)


def test_the_rewards_given_are_left_alone():
    rewards, ids = torch.tensor([1.0, 2.0]), torch.tensor([0, 0])
    group_advantages(rewards, ids, baseline="none", scale="none").zero_()
    assert rewards.tolist() == [1, 2]


def test_constant_groups_are_counted_and_their_samples_marked():
    rewards, ids = torch.tensor([1.0, 0, 1, 1, 2]), torch.tensor([3, 1, 1, 3, 2])
    assert constant_groups(rewards, ids) == 2
    assert constant_rows(rewards, ids).tolist() == [True, False, False, True, True]


def test_constant_rows_are_those_of_a_loop_in_plain_python(scored):
    rewards, ids, *_ = scored
    expected = [False] * len(rewards)
    for rows in members(ids):
        for row in rows:
            expected[row] = len({rewards.tolist()[j] for j in rows}) == 1
    assert constant_rows(rewards, ids).tolist() == expected
    assert constant_groups(rewards, ids) == 2


def test_pass_at_k_gives_the_best_what_it_adds_to_the_second_best():
    rewards, ids = torch.tensor([1.0, 5, 4, 2, 8, -3]), torch.tensor([6, 0, 6, 0, 0, 2])
    assert pass_at_k_advantages(rewards, ids).tolist() == [0, 0, 3, 0, 3, 0]


def test_pass_at_k_gives_two_equally_good_ones_nothing():
    rewards, ids = torch.tensor([1.0, 0, 1, 7]), torch.tensor([0, 0, 0, 1])
    assert pass_at_k_advantages(rewards, ids).tolist() == [0, 0, 0, 0]


def test_pass_at_k_is_the_best_of_all_less_the_best_of_the_others_in_plain_python(scored):
    rewards, ids, *_ = scored
    expected = [0.0] * len(rewards)
    for rows in members(ids):
        for row in rows:
            others = [float(rewards[j]) for j in rows if j != row]
            if others:
                expected[row] = max(*others, float(rewards[row])) - max(others)
    assert pass_at_k_advantages(rewards, ids).tolist() == pytest.approx(expected, abs=1e-10)


def test_gdpo_normalises_each_part_before_they_are_added():
    parts = torch.tensor([[1.0, 0, 0, 1], [10, 30, 30, 10]], dtype=torch.float64)
    weights, ids = torch.tensor([2.0, 1.0]), torch.zeros(4, dtype=torch.int64)
    a = 0.866025  # each part's ± 1/2 of its range, over 0.57735 of it
    found = gdpo_advantages(parts, weights, ids)
    assert found.tolist() == pytest.approx([a, -a, -a, a], abs=1e-5)


def test_gdpo_takes_nothing_from_a_part_that_is_constant_in_a_group():
    parts = torch.tensor([[1.0, 0, 0, 1], [0.7, 0.7, 0.1, 0.2]], dtype=torch.float64)
    ids = torch.tensor([5, 5, 3, 3])
    found = gdpo_advantages(parts, torch.tensor([1.0, 3.0]), ids)
    straight = group_advantages(parts[0], ids)
    assert found[:2].tolist() == straight[:2].tolist()
    assert found[2].item() == pytest.approx(-4 / 2**0.5, abs=1e-4)


def test_gdpo_is_that_of_a_loop_in_plain_python(scored):
    rewards, ids, lengths, greedy = scored
    parts = torch.stack([rewards, lengths.double(), rewards.sin() + greedy])
    weights = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
    expected = [0.0] * len(ids)
    for part, weight in zip(parts.tolist(), weights.tolist(), strict=True):
        for rows in members(ids):
            own = [part[j] for j in rows]
            if min(own) < max(own):
                mean, std = statistics.fmean(own), statistics.stdev(own)
                for row in rows:
                    expected[row] += weight * (part[row] - mean) / (std + 1e-6)
    found = gdpo_advantages(parts, weights, ids)
    assert found.tolist() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    "function",
    [
        pass_at_k_advantages,
        constant_rows,
        lambda rewards, ids: gdpo_advantages(
            torch.stack([rewards, rewards.sin()]), torch.tensor([1.0, -2.0]), ids
        ),
    ],
)
def test_permuting_samples_with_their_ids_permutes_the_result(function, scored):
    rewards, ids, *_ = scored
    order = torch.randperm(13)
    found = function(rewards[order], ids[order])
    torch.testing.assert_close(found, function(rewards, ids)[order], atol=1e-12, rtol=0)


def test_gdpo_without_parts_is_zero():
    found = gdpo_advantages(torch.zeros(0, 3), torch.zeros(0), torch.zeros(3, dtype=torch.int64))
    assert found.tolist() == [0, 0, 0]


def test_gdpo_names_shapes_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"got \(2, 3\), \(3,\) and \(3,\)"):
        gdpo_advantages(torch.zeros(2, 3), torch.zeros(3), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "function", [group_advantages, constant_groups, constant_rows, pass_at_k_advantages]
)
def test_a_reward_that_is_no_number_is_refused(function, junk):
    rewards, ids = torch.tensor([1.0, 0.0, junk]), torch.tensor([4, 5, 5])
    with pytest.raises(RewardError, match=f"1 of 3 are not finite, the first {junk} at row 2 of"):
        function(rewards, ids)


@pytest.mark.parametrize("knob", ["baseline", "scale"])
def test_a_knob_that_does_not_exist_is_refused(knob):
    with pytest.raises(ConfigError, match=f"{knob}: no such choice 'median'; use one of "):
        advantages([1, 0], **{knob: "median"})


def test_shapes_that_differ_are_named():
    with pytest.raises(ShapeError, match=r"rewards \(3,\), group_ids \(2,\)"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
