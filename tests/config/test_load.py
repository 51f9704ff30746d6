import re

import pytest
import yaml

from verl_lab.config.load import (
    dump_config,
    live_keys,
    load_config,
    set_knob,
    start_problems,
)
from verl_lab.config.schema import LabConfig
from verl_lab.errors import ConfigError

FOUR_SECTIONS = """
model:        {name_or_path: Qwen/Qwen2-1.5B-Instruct, torch_dtype: bfloat16, use_flash_attention_2: true}
rollout:      {num_rollout_workers: 2, rollout_batch_size: 32, max_new_tokens: 256, device_map: ["cuda:0", "cuda:1"]}
trainer:      {num_train_workers: 2, train_batch_size: 64, device_map: ["cuda:2", "cuda:3"], fsdp_config: {cpu_offload: true}}
reward_model: {name_or_path: OpenAssistant/reward-model-deberta-v3-large-v2, device: "cuda:0"}
"""  # noqa: E501
MODEL = {"model": {"name_or_path": "some/model"}}
TASK = {**MODEL, "task": {"name": "add_compare"}}

OPTIONAL_SECTIONS = ("task", "reward_model", "critic", "lora")


def leaves(model=LabConfig):
    tree = yaml.safe_load(dump_config(load_config({**TASK, "reward_model": {"name_or_path": "m"}})))

    def count(node):
        return sum(count(v) if isinstance(v, dict) and v else 1 for v in node.values())

    return count(tree)


@pytest.fixture
def write(tmp_path):
    def _write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return _write


def test_the_four_section_file_loads_as_it_stands(write):
    config = load_config(write(FOUR_SECTIONS))
    assert config.trainer.train_batch_size == 64
    assert config.rollout.device_map == ["cuda:0", "cuda:1"]
    assert config.trainer.fsdp_config.cpu_offload
    assert config.prompts_per_step == 8


def test_there_are_at_most_ninety_keys():
    assert leaves() <= 90


def test_every_key_has_its_help():
    def missing(model, prefix=""):
        for name, field in model.model_fields.items():
            section = field.annotation
            if isinstance(section, type) and hasattr(section, "model_fields"):
                yield from missing(section, f"{prefix}{name}.")
            elif not field.description and name not in OPTIONAL_SECTIONS:
                yield prefix + name

    assert list(missing(LabConfig)) == []


def test_overrides_lie_on_top_and_are_read_as_yaml(write):
    config = load_config(
        write(yaml.safe_dump(TASK)),
        ["trainer.learning_rate=1e-6", "rollout.device_map=[cpu:0]", "task.max_digits=3", "seed=7"],
    )
    assert config.trainer.learning_rate == 1e-6
    assert config.rollout.device_map == ["cpu:0"]
    assert config.task.options == {"max_digits": 3}
    assert config.seed == 7


def test_every_problem_is_reported_at_once_with_key_value_and_fix(write):
    text = """
model: {name_or_path: m}
rollout: {group_sise: 4, temperature: 0, top_p: 0.5}
algorithm: {baseline: group_meam}
trainer: {device_map: ["cuda:x"]}
"""
    with pytest.raises(ConfigError) as e:
        load_config(write(text), ["foo", "eval.every_stps=3"])
    message = str(e.value)
    for expected in (
        "rollout.group_sise: no such key; did you mean rollout.group_size?",
        "rollout.temperature: Input should be greater than 0 (got 0)",
        "did you mean group_mean?",
        "rollout.top_p=0.5: samples from another distribution",
        "trainer.device_map: 'cuda:x' is no device; use `auto`, `cpu`",
        "foo: is no override; write key=value",
        "eval.every_stps: no such key; did you mean eval.every_steps?",
    ):
        assert expected in message


def test_sizes_that_do_not_divide_name_both_keys_and_what_would_do():
    with pytest.raises(ConfigError) as e:
        load_config({**MODEL, "trainer": {"train_batch_size": 30}})
    assert (
        "trainer.train_batch_size=30 is no multiple of rollout.group_size=8; use 24 or 32"
        in str(e.value)
    )
    with pytest.raises(ConfigError, match=re.escape("use one of [1, 2, 4, 8]")):
        load_config({**MODEL, "trainer": {"updates_per_step": 3}})


def test_sizes_are_checked_also_where_another_key_is_wrong():
    with pytest.raises(ConfigError) as e:
        load_config({**MODEL, "trainer": {"train_batch_size": 30}, "rollout": {"temp": 1}})
    assert "rollout.temp: no such key" in str(e.value)
    assert "trainer.train_batch_size=30 is no multiple" in str(e.value)


def test_prompts_come_from_one_place_only():
    with pytest.raises(ConfigError, match=r"task and data\.path: prompts come from one place"):
        load_config({**TASK, "data": {"path": "x.jsonl"}})


def test_a_group_baseline_needs_a_group():
    with pytest.raises(ConfigError, match=r"rollout\.group_size=1: algorithm\.baseline=group_mean"):
        load_config({**TASK, "rollout": {"group_size": 1}})


def test_as_many_devices_as_workers_or_one():
    with pytest.raises(ConfigError, match=r"names 2 devices for rollout\.num_rollout_workers=3"):
        load_config(
            {**TASK, "rollout": {"num_rollout_workers": 3, "device_map": ["cpu:0", "cpu:1"]}}
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {name_or_path: m}\nmodel: {}", "model: is given twice"),
        ("a: [1", "is no YAML"),
        ("- 1", "holds no settings"),
        ("steps: 3", "model: is required"),
    ],
)
def test_a_broken_file_says_what_is_wrong_with_it(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(text))


def test_a_missing_file_names_one_that_is_near(write):
    path = write("steps: 3")
    with pytest.raises(ConfigError, match=r"cannot be read.*did you mean .*config\.yaml"):
        load_config(path.with_name("confg.yaml"))


def test_a_dumped_config_loads_to_the_same_tree(write):
    config = load_config(TASK, ["trainer.learning_rate=3e-7"])
    assert load_config(write(dump_config(config))) == config


def test_live_knobs_change_and_are_checked_together():
    config = load_config(TASK)
    assert set_knob(config, {"rollout.temperature": 0.5}).rollout.temperature == 0.5
    both = set_knob(config, {"rollout.group_size": 5, "trainer.train_batch_size": 50})
    assert both.prompts_per_step == 10
    with pytest.raises(ConfigError, match="no multiple"):
        set_knob(config, {"rollout.group_size": 5})


def test_a_fixed_or_unknown_knob_names_those_that_may_change():
    config = load_config(TASK)
    with pytest.raises(ConfigError, match=r"seed: is fixed while a session lives.*rollout\.top_k"):
        set_knob(config, {"seed": 1})
    with pytest.raises(ConfigError, match=r"did you mean rollout\.temperature\?"):
        set_knob(config, {"rollout.temprature": 1})
    assert "rollout.rollout_batch_size" in live_keys()


def test_what_only_a_start_can_know_is_said_before_the_start():
    found = "\n".join(start_problems(load_config(yaml.safe_load(FOUR_SECTIONS))))
    assert "rollout.device_map: cuda:0 does not exist here; there is cpu:" in found
    assert "task: there are no prompts" in found
    assert "trainer.num_train_workers: is 2" in found


def test_a_reward_in_code_counts_as_one():
    config = load_config({**MODEL, "data": {"prompts": ["a"]}})
    assert any(problem.startswith("reward.parts") for problem in start_problems(config))
    assert start_problems(config, has_reward=True) == []


def test_files_that_do_not_exist_are_named():
    config = load_config(
        {**MODEL, "data": {"path": "no.jsonl"}, "reward": {"parts": {"no.py:f": 1.0}}}
    )
    found = "\n".join(start_problems(config))
    assert "data.path: no.jsonl does not exist" in found
    assert "the file no.py does not exist" in found


def test_flash_attention_on_a_cpu_is_refused_at_the_start():
    config = load_config(
        {
            **TASK,
            "model": {"name_or_path": "m", "use_flash_attention_2": True},
            "rollout": {"device_map": "cpu"},
            "trainer": {"device_map": "cpu"},
        }
    )
    assert any("use_flash_attention_2: needs a GPU" in p for p in start_problems(config))


def test_training_in_float16_is_refused_at_the_start():
    config = load_config(TASK, ["model.torch_dtype=float16"])
    assert any(p.startswith("model.torch_dtype: float16") for p in start_problems(config))
