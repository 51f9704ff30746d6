import pytest

from verl_lab.config.load import load_config
from verl_lab.config.presets import PRESETS, describe_preset, describe_recipe

MODEL = {"model": {"name_or_path": "somewhere"}}


def config(recipe, **more):
    return load_config({**MODEL, "recipe": recipe, **more})


@pytest.mark.parametrize("name", PRESETS)
def test_every_recipe_sets_keys_that_exist_and_agree(name):
    found = config(name).model_dump()
    for key, value in PRESETS[name].sets.items():
        tree = found
        for part in key.split("."):
            tree = tree[part]
        assert tree == value or (value == {} and tree is not None), key


def test_what_the_user_sets_wins_over_the_recipe():
    found = config("dapo", algorithm={"clip_high": 0.25})
    assert found.algorithm.clip_high == 0.25
    assert found.algorithm.dynamic_sampling_rounds == 4


def test_an_override_that_names_a_recipe_brings_what_it_sets():
    found = load_config(MODEL, ["recipe=ppo"])
    assert found.critic is not None
    assert found.algorithm.advantage == "gae"
    assert found.rollout.group_size == 1


def test_a_resolved_config_loads_as_it_was():
    found = config("ppo", algorithm={"scale": "none"})
    assert load_config(found.model_dump()) == found


def test_a_recipe_says_what_it_sets_and_what_the_user_set_otherwise():
    assert "algorithm.clip_high: 0.28" in describe_preset("dapo")
    text = describe_recipe("dapo", config("dapo", algorithm={"clip_high": 0.25}).model_dump())
    assert "algorithm.clip_high=0.25 (yours)" in text
    assert "algorithm.dynamic_sampling_rounds=4" in text


@pytest.mark.parametrize(
    ("recipe", "objective", "per_prompt"),
    [("grpo", "policy", 8), ("sft", "sft", 1), ("dpo", "preference", 2), ("kto", "preference", 1),
     ("reward_model", "reward_model", 2), ("online_dpo", "preference", 8)],
)  # fmt: skip
def test_a_step_counts_samples_by_what_is_learned(recipe, objective, per_prompt):
    found = config(recipe, trainer={"train_batch_size": 16})
    assert found.objective == objective
    assert found.samples_per_prompt == per_prompt
    assert found.prompts_per_step == 16 // per_prompt
