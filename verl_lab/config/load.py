"""From YAML and overrides to the settings tree, and every problem at once, each with its key and
the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from verl_lab.config.devices import missing_devices, parse_device
from verl_lab.config.functions import name_problems
from verl_lab.config.presets import apply_preset
from verl_lab.config.schema import LabConfig
from verl_lab.config.sources import model_problem
from verl_lab.errors import ConfigError, DeviceError


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-6` is a number, a key given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise ConfigError(f"{key}: is given twice in the section at line {line}; keep one")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


def load_config(
    source: str | Path | Mapping[str, Any] | LabConfig, overrides: Sequence[str] = ()
) -> LabConfig:
    """The settings of a YAML file or a mapping, with `dotted.key=value` overrides on top.

    Raises:
        ConfigError: lists every problem, a line each.
    """
    if isinstance(source, LabConfig):
        tree, name = source.model_dump(exclude_unset=True), "config"
    elif isinstance(source, Mapping):
        tree, name = _copy(source), "config"
    else:
        tree, name = _read(Path(source)), str(source)
    problems = [problem for text in overrides if (problem := _override(tree, text))]
    apply_preset(tree)
    config = None
    try:
        config = LabConfig.model_validate(tree)
    except ValidationError as error:
        problems += _problems(error)
        problems += _problems_of_the_rest(tree, error)
    else:
        problems += _cross_problems(config)
    if problems or config is None:
        raise ConfigError(f"{name}:\n" + "\n".join(f"  {p}" for p in dict.fromkeys(problems)))
    return config


def dump_config(config: LabConfig) -> str:
    """The whole tree as YAML, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def live_keys() -> list[str]:
    """The dotted keys that may change while a run is under way."""
    return [key for key, field in _fields(LabConfig) if (field.json_schema_extra or {}).get("live")]


def value_of(config: LabConfig, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def set_knob(config: LabConfig, changes: Mapping[str, Any]) -> LabConfig:
    """The settings with live keys changed; all of them are checked together.

    Raises:
        ConfigError: a key may not change while a run is under way, or a value does not fit.
    """
    live = live_keys()
    tree = config.model_dump()
    for key, value in changes.items():
        if key not in live:
            close = difflib.get_close_matches(key, live, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            is_known = key in dict(_fields(LabConfig))
            what = "is fixed while a session lives" if is_known else "no such key"
            raise ConfigError(f"{key}: {what}; {hint}those that may change are {', '.join(live)}")
        section, _, name = key.rpartition(".")
        (tree[section] if section else tree)[name] = value
    changed = load_config(tree)
    problems = list(name_problems(changed))
    if problems:
        raise ConfigError("\n".join(problems))
    return changed


def start_problems(config: LabConfig, *, has_reward: bool = False) -> list[str]:
    """What keeps a session from starting here, although the settings themselves are sound.

    Args:
        config: the settings.
        has_reward: a reward function is given in code.
    """
    problems = [*name_problems(config), *missing_devices(config), *_model_problems(config)]
    data = config.data
    if config.objective in ("preference", "reward_model") and not config.samples_policy:
        if data.path is None and config.task is None:
            problems.append(f"data.path: recipe {config.recipe} learns from pairs; name their file")
    elif config.task is None and data.path is None and data.prompts is None:
        problems.append("task: there are no prompts; set task, data.path or data.prompts")
    problems += [
        f"data.{key}: {path} does not exist; name a .jsonl or .parquet file or a dataset folder"
        for key, path in (("path", data.path), ("heldout_path", data.heldout_path))
        if path is not None and not Path(path).exists()
    ]
    parts = config.reward.parts
    has_reward = has_reward or bool(parts or config.task or config.reward_model)
    if config.samples_policy and not has_reward:
        problems.append(
            "reward.parts: nothing scores the responses; name a function as file.py:function, "
            "use a task, or pass reward= to Session"
        )
    if "task" in parts and config.task is None:
        problems.append("reward.parts: `task` has a weight, but there is no task; set task.name")
    problems += [
        f"reward.parts: {part}: the file {file} does not exist; paths are relative to where you "
        f"start"
        for part in parts
        if (file := part.rpartition(":")[0]).endswith(".py") and not Path(file).exists()
    ]
    if config.trainer.num_train_workers > 1:
        problems.append(
            f"trainer.num_train_workers: is {config.trainer.num_train_workers}, and the trainer of "
            f"this version is one process; set it to 1"
        )
    if config.model.torch_dtype == "float16":
        problems.append(
            "model.torch_dtype: float16 loses small gradients, and this trainer does not scale the "
            "loss; use bfloat16"
        )
    if config.model.use_flash_attention_2 and not missing_devices(config):
        problems += _flash_problems(config)
    return problems


def _model_problems(config: LabConfig) -> list[str]:
    named = {"model.name_or_path": config.model.name_or_path}
    if config.reward_model is not None:
        named["reward_model.name_or_path"] = config.reward_model.name_or_path
    if config.critic is not None and config.critic.name_or_path not in (None, "policy"):
        named["critic.name_or_path"] = str(config.critic.name_or_path)
    found = (model_problem(key, name) for key, name in named.items())
    return [text for text in found if text is not None]


def _flash_problems(config: LabConfig) -> list[str]:
    from verl_lab.config.devices import resolve_devices

    resolved = resolve_devices(config)
    on_cpu = [role for role in ("rollout", "trainer") for d in resolved[role] if d.kind == "cpu"]
    if not on_cpu:
        return []
    return [
        f"model.use_flash_attention_2: needs a GPU, and {on_cpu[0]} runs on "
        f"{resolved[on_cpu[0]][0]}; "
        f"set it to false"
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        near = sorted(
            str(p) for p in (*path.parent.glob("*.yaml"), *Path("configs").glob("*.yaml"))
        )
        close = difflib.get_close_matches(str(path), near, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{path}: cannot be read ({error.strerror}){hint}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is no YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}:\n  {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds no settings; it must be a mapping with `model:` at least")
    return tree


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _problems_of_the_rest(tree: Mapping[str, Any], error: ValidationError) -> list[str]:
    """What else is wrong, between keys that are sound themselves."""
    rest = _without(tree, [problem["loc"] for problem in error.errors()])
    try:
        return list(_cross_problems(LabConfig.model_validate(rest)))
    except ValidationError as again:
        between = [problem for problem in again.errors() if not problem["loc"]]
        return [problem["msg"].removeprefix("Value error, ") for problem in between]


def _without(tree: Mapping[str, Any], places: list[tuple[Any, ...]]) -> dict[str, Any]:
    """The tree without the keys at these places, to see what is wrong with the rest."""
    rest = _copy(tree)
    for place in places:
        section: Any = rest
        for part in place[:-1]:
            section = section.get(part, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict) and place:
            section.pop(place[-1], None)
    return rest


def _override(tree: dict[str, Any], text: str) -> str | None:
    """Puts one `dotted.key=value` into the tree; returns what is wrong with it."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        return f"{text}: is no override; write key=value, such as rollout.rollout_batch_size=48"
    section, parts = tree, key.strip().split(".")
    for part in parts[:-1]:
        child = section.get(part)
        if child is None:
            child = section[part] = {}
        if not isinstance(child, dict):
            return f"{key}: {part} is {child!r}, not a section"
        section = child
    try:
        section[parts[-1]] = yaml.load(value, _Loader)
    except yaml.YAMLError:
        return f"{key}: {value!r} is no YAML value; put quotes around it"
    return None


def _problems(error: ValidationError) -> Iterator[str]:
    known = [key for key, _ in _fields(LabConfig, with_sections=True)]
    for problem in error.errors():
        loc = [str(part) for part in problem["loc"] if part not in ("str", "list[str]")]
        key = ".".join(loc)
        if problem["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, known, n=1) or difflib.get_close_matches(
                loc[-1], [k for k in known if k.rpartition(".")[2] == loc[-1]], n=1
            )
            yield f"{key}: no such key" + (f"; did you mean {close[0]}?" if close else "")
        elif problem["type"] == "literal_error":
            choices = re.findall(r"'([^']*)'", problem["msg"])
            close = difflib.get_close_matches(str(problem["input"]), choices, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"{key}: {problem['msg']} (got {problem['input']!r}){hint}"
        elif problem["type"] == "missing":
            yield f"{key}: is required; set it in the file or as {key}=…"
        elif key:
            text = problem["msg"].removeprefix("Value error, ")
            yield f"{key}: {text} (got {problem['input']!r})"
        else:
            yield problem["msg"].removeprefix("Value error, ")


def _cross_problems(config: LabConfig) -> Iterator[str]:
    data, rollout, algorithm = config.data, config.rollout, config.algorithm
    given = {
        "task": config.task is not None,
        "data.path": data.path is not None,
        "data.prompts": data.prompts is not None,
    }
    named = [key for key, is_given in given.items() if is_given]
    if not config.samples_policy and data.path is not None:
        named = [key for key in named if key != "task"]  # it checks answers, and makes no prompts
    if len(named) > 1:
        yield f"{' and '.join(named)}: prompts come from one place; keep one of them"
    if (rollout.top_p < 1 or rollout.top_k > 0) and not rollout.allow_truncated_sampling:
        key = (
            f"rollout.top_p={rollout.top_p}"
            if rollout.top_p < 1
            else f"rollout.top_k={rollout.top_k}"
        )
        yield (
            f"{key}: samples from another distribution than the loss assumes; use top_p=1 and "
            f"top_k=0, "
            f"or set rollout.allow_truncated_sampling=true"
        )
    yield from _algorithm_problems(config)
    is_grouped = algorithm.advantage == "pass_at_k" or (
        algorithm.advantage in ("group", "returns") and algorithm.baseline not in ("none", "greedy")
    )
    if is_grouped and config.objective == "policy" and rollout.group_size < 2:
        yield (
            f"rollout.group_size={rollout.group_size}: algorithm.baseline={algorithm.baseline} "
            f"compares "
            f"the samples of a group; use at least 2, or algorithm.baseline=none"
        )
    yield from _device_problems(
        "rollout.device_map", rollout.device_map, rollout.num_rollout_workers
    )
    trainer, reward = config.trainer, config.reward
    yield from _device_problems("trainer.device_map", trainer.device_map, trainer.num_train_workers)
    yield from _device_problems("reward.device_map", reward.device_map, reward.num_reward_workers)
    if config.reward_model is not None:
        yield from _device_problems("reward_model.device", config.reward_model.device, 1)


def _algorithm_problems(config: LabConfig) -> Iterator[str]:
    algorithm, data = config.algorithm, config.data
    low, high = algorithm.correction_bounds
    if not 0 <= low <= high:
        yield f"algorithm.correction_bounds: is [{low}, {high}]; give a lower and a higher ratio"
    if algorithm.bypass and config.correction != "none":
        yield (
            f"algorithm.bypass, algorithm.correction={algorithm.correction}: with both the ratio "
            f"would count twice; use one of them"
        )
    if config.pipeline.max_staleness and config.objective != "policy":
        yield (
            f"pipeline.max_staleness={config.pipeline.max_staleness}: recipe {config.recipe} has "
            f"nothing to sample ahead; leave it at 0"
        )
    if algorithm.advantage == "gae" and config.critic is None:
        yield "algorithm.advantage=gae: needs a critic; add a `critic:` section, or use another"
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        yield "algorithm.kl_target: adapts algorithm.kl_coef, which is 0; start it above 0"
    if not config.samples_policy and data.prompts is not None:
        yield f"data.prompts: recipe {config.recipe} learns from responses; give data.path"
    if algorithm.policy_loss == "gspo" and max(algorithm.clip_low, algorithm.clip_high) >= 0.1:
        yield (
            f"algorithm.clip_high={algorithm.clip_high}: gspo's ratio is a mean over a response "
            f"and stays near 1; use 3e-4 and 4e-4 for clip_low and clip_high, as recipe gspo does"
        )
    if config.lora is not None and config.objective == "reward_model":
        yield "lora: a reward model is trained whole; leave the section out"
    has_head_on_policy = config.critic is not None and config.critic.name_or_path == "policy"
    if config.lora is not None and has_head_on_policy:
        yield "critic.name_or_path=policy: the trunk has adapters; give the critic its own model"
    if config.objective == "preference" and config.samples_policy and config.rollout.group_size < 2:
        yield (
            f"rollout.group_size={config.rollout.group_size}: {config.recipe} compares the samples "
            f"of a group; use at least 2"
        )


def _device_problems(key: str, given: str | list[str], count: int) -> Iterator[str]:
    texts = [given] if isinstance(given, str) else given
    if len(texts) not in (1, count):
        section = key.partition(".")[0]
        workers = {"rollout": "num_rollout_workers", "trainer": "num_train_workers"}
        name = workers.get(section, "num_reward_workers")
        yield (
            f"{key}: names {len(texts)} devices for {section}.{name}={count}; "
            f"name {count}, or one for all"
        )
    for text in texts:
        try:
            parse_device(text)
        except DeviceError as error:
            yield f"{key}: {error}"


def _fields(
    model: type[BaseModel], prefix: str = "", *, with_sections: bool = False
) -> Iterator[tuple[str, Any]]:
    """Every dotted key of the tree with its field."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        candidates = (field.annotation, *get_args(field.annotation))
        section = next(
            (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None
        )
        if section is None or with_sections:
            yield key, field
        if section is not None:
            yield from _fields(section, f"{key}.", with_sections=with_sections)
