import math

import pytest

from verl_lab.batch.columns import Batch
from verl_lab.config.functions import _registered
from verl_lab.config.load import load_config
from verl_lab.controller.estimation import best_and_worst, constant_samples, with_advantages
from verl_lab.errors import ConfigError, ShapeError

PARTS = {"task": 1.0}


def config(**algorithm):
    return load_config({"model": {"name_or_path": "somewhere"}, "algorithm": algorithm})


@pytest.fixture
def batch():
    """Two groups of two, their rows mixed, with one to three tokens."""
    lengths = [2, 1, 3, 1]
    return Batch.from_dict(
        {
            "group_id": [7, 3, 7, 3],
            "response_ids": [[5] * n for n in lengths],
            "response_mask": [[True] * n for n in lengths],
            "rollout_logprobs": [[-1.0] * n for n in lengths],
            "finish_reason": ["stop", "stop", "length", "stop"],
            "reward": [1.0, 2.0, 0.0, 2.0],
            "reward/task": [1.0, 2.0, 0.0, 2.0],
        }
    )


def test_grpo_gives_every_token_the_advantage_of_its_sample(batch):
    found = with_advantages(batch, config(), PARTS, 0.0).batch["advantages"]
    high = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert found[0] == pytest.approx([high] * 2)
    assert found[2] == pytest.approx([-high] * 3)
    assert found[1] == found[3] == [0.0]


def test_the_kl_term_in_the_reward_is_taken_off_token_by_token(batch):
    known = batch.with_columns({"ref_logprobs": [[-1.5] * 2, [-1.0], [-1.0] * 3, [-1.0]]})
    knobs = {"advantage": "returns", "baseline": "none", "scale": "none"}
    settings = config(**knobs, kl_in="reward", kl_estimator="k1", kl_coef=0.2)
    found = with_advantages(known, settings, PARTS, 0.2)
    assert found.batch["advantages"][0] == pytest.approx([1 - 0.2 * 0.5 * 2, 1 - 0.2 * 0.5])
    assert found.metrics["policy/kl_ref"] == pytest.approx(2 * 0.5 / 7)


def test_a_kl_term_in_the_reward_without_a_reference_says_which_stage_is_missing(batch):
    settings = config(kl_in="reward", kl_coef=0.1)
    with pytest.raises(ShapeError, match="run the stage reference_logprobs first"):
        with_advantages(batch, settings, PARTS, 0.1)


def test_gae_writes_returns_beside_the_advantages(batch):
    values = [[0.5, 0.6], [0.0], [0.0] * 3, [0.0]]
    tree = {
        "model": {"name_or_path": "somewhere"},
        "recipe": "ppo",
        "algorithm": {"scale": "none", "advantage_options": {"gamma": 1.0, "lam": 0.95}},
    }
    known = batch.with_columns({"values": values})
    found = with_advantages(known, load_config(tree), PARTS, 0.0).batch
    last = 1 - 0.6
    first = 0.6 - 0.5 + 0.95 * last
    assert found["advantages"][0] == pytest.approx([first, last])
    assert found["returns"][0] == pytest.approx([first + 0.5, 1.0])


def test_truncated_samples_can_be_left_out_of_the_loss(batch):
    found = with_advantages(batch, config(mask_truncated=True), PARTS, 0.0)
    assert found.batch["loss_mask"] == [[True] * 2, [True], [False] * 3, [True]]
    assert found.metrics["rollout/masked_fraction"] == 0.25


def test_whitened_advantages_have_mean_zero_over_tokens(batch):
    found = with_advantages(batch, config(baseline="none", scale="whiten"), PARTS, 0.0).batch
    flat = [value for row in found["advantages"] for value in row]
    assert sum(flat) == pytest.approx(0, abs=1e-6)


def test_a_function_of_the_users_own_gets_the_samples_and_its_options(batch):
    def scaled(samples, *, factor):
        return factor * samples.rewards

    _registered["advantage"]["scaled"] = scaled
    try:
        settings = config(advantage="scaled", scale="none", advantage_options={"factor": 2.0})
        found = with_advantages(batch, settings, PARTS, 0.0).batch
        assert found["advantages"] == [[2.0] * 2, [4.0], [0.0] * 3, [4.0]]
        wrong = config(advantage="scaled", advantage_options={"gamma": 1.0})
        with pytest.raises(ConfigError, match="has no option 'gamma'; it has factor"):
            with_advantages(batch, wrong, PARTS, 0.0)
    finally:
        del _registered["advantage"]["scaled"]


def test_an_estimator_that_returns_another_number_of_values_is_refused(batch):
    _registered["advantage"]["short"] = lambda samples: samples.rewards[:3]
    try:
        with pytest.raises(ShapeError, match=r"returned \(3,\) for 4 samples of 7 tokens"):
            with_advantages(batch, config(advantage="short"), PARTS, 0.0)
    finally:
        del _registered["advantage"]["short"]


def test_groups_are_constant_by_what_is_right_and_not_by_length(batch):
    assert constant_samples(batch, PARTS).tolist() == [False, True, False, True]
    shaped = batch.with_columns(
        {"reward": [1.0, 1.9, 0.0, 1.7], "reward/length": [0.0, 0.1, 0.0, 0.3]}
    )
    parts = {"task": 1.0, "length": -1.0}
    assert constant_samples(shaped, parts).tolist() == [False, True, False, True]


def test_pairs_are_the_best_and_the_worst_of_groups_that_differ(batch):
    found = best_and_worst(batch)
    assert found["group_id"] == [7, 7]
    assert found["reward"] == [1.0, 0.0]
    assert found["is_chosen"] == [True, False]
    assert len(best_and_worst(batch.filter([False, True, False, True]))) == 0
