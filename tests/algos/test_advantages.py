import pytest
import torch

from verl_lab.algos.advantages import constant_groups, group_advantages
from verl_lab.errors import ConfigError, RewardError, ShapeError


def advantages(rewards, groups=None, **knobs):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else torch.tensor(groups)
    return group_advantages(rewards, ids, **knobs).tolist()


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


def test_batch_std_is_that_of_all_rewards():
    found = advantages([1, 0, 3, 2], [0, 0, 1, 1], scale="batch_std")
    std = torch.tensor([1.0, 0, 3, 2]).std().item()
    assert found == pytest.approx([0.5 / std, -0.5 / std, 0.5 / std, -0.5 / std], rel=1e-5)


def test_without_a_baseline_the_reward_itself_counts():
    assert advantages([1, 0, 2], baseline="none", scale="none") == [1, 0, 2]


@pytest.mark.parametrize("rewards", [[1000.1] * 3, [0.7] * 11, [0.0] * 4, [5.0]])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_gets_exactly_zero(rewards, baseline, dtype):
    ids = torch.zeros(len(rewards), dtype=torch.int64)
    found = group_advantages(torch.tensor(rewards, dtype=dtype), ids, baseline=baseline)
    assert found.tolist() == [0.0] * len(rewards)


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


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
def test_permuting_samples_with_their_ids_permutes_the_advantages(baseline, scale):
    rewards, ids = torch.randn(12, dtype=torch.float64), torch.arange(12) // 4
    order = torch.randperm(12)
    found = group_advantages(rewards[order], ids[order], baseline=baseline, scale=scale)
    straight = group_advantages(rewards, ids, baseline=baseline, scale=scale)
    torch.testing.assert_close(found, straight[order], atol=1e-12, rtol=0)


def test_the_rewards_given_are_left_alone():
    rewards, ids = torch.tensor([1.0, 2.0]), torch.tensor([0, 0])
    group_advantages(rewards, ids, baseline="none", scale="none").zero_()
    assert rewards.tolist() == [1, 2]


def test_constant_groups_are_counted():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0])
    assert constant_groups(rewards, torch.tensor([0, 0, 1, 1, 2])) == 2


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
@pytest.mark.parametrize("function", [group_advantages, constant_groups])
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
