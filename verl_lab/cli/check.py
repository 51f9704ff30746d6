"""`verl-lab check`: what a config means on this machine, without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_lab.cli.terminal import print_line
from verl_lab.config.devices import resolve_devices
from verl_lab.config.load import load_config, start_problems
from verl_lab.config.schema import LabConfig
from verl_lab.errors import ConfigError


def check(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="A YAML config.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Over the config's keys.")
    ] = None,
) -> None:
    """Check a config, and show the plan: sizes, who runs where. Nothing is started.

    Example: verl-lab check --config configs/quickstart.yaml rollout.group_size=16
    """
    loaded = load_config(config, overrides or [])
    facts = plan(loaded)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print_line(f"{name:<{width}}  {value}")
    problems = start_problems(loaded, has_reward=False)
    if problems:
        raise ConfigError("\n".join([f"{config}: cannot start:", *(f"  {p}" for p in problems)]))


def plan(config: LabConfig) -> list[tuple[str, str]]:
    """What the config comes to, as names and values for a person."""
    rollout, trainer = config.rollout, config.trainer
    num_samples, num_updates = trainer.train_batch_size, trainer.updates_per_step
    each = -(-rollout.rollout_batch_size // rollout.num_rollout_workers)
    facts = [
        ("policy", f"{config.model.name_or_path} ({config.model.torch_dtype})"),
        ("prompts", _prompts(config)),
        ("steps", f"{config.steps:,}"),
        (
            "samples a step",
            f"{num_samples:,} = {config.prompts_per_step:,} prompts x "
            f"{rollout.group_size:,} responses",
        ),
        ("updates a step", f"{num_updates:,}, of {num_samples // num_updates:,} samples"),
        (
            "sequences in flight",
            f"{rollout.rollout_batch_size:,}: {each:,} on each of "
            f"{rollout.num_rollout_workers:,} rollout workers",
        ),
    ]
    for role, devices in resolve_devices(config).items():
        facts += [(f"{role}-{i}", f"on {device}") for i, device in enumerate(devices)]
    return [
        *facts,
        ("reward", _reward(config)),
        ("evaluation", _evaluation(config)),
        ("checkpoints", _checkpoints(config)),
    ]


def _prompts(config: LabConfig) -> str:
    if config.task is not None:
        return f"task {config.task.name}"
    if config.data.path is not None:
        return config.data.path
    return f"{len(config.data.prompts or []):,} in the config"


def _reward(config: LabConfig) -> str:
    parts = dict(config.reward.parts)
    if not parts and config.task is not None:
        parts = {"task": 1.0}
    if config.reward_model is not None:
        parts[config.reward_model.name_or_path] = config.reward_model.weight
    return " + ".join(f"{weight:g} x {part}" for part, weight in parts.items()) or "none"


def _evaluation(config: LabConfig) -> str:
    if config.eval.every_steps == 0:
        return "never"
    every = _every(config.eval.every_steps)
    return f"at the start, {every} and at the end, on {config.eval.num_prompts:,} held-out prompts"


def _checkpoints(config: LabConfig) -> str:
    if config.checkpoint.every_steps == 0:
        return "at the end"
    every = _every(config.checkpoint.every_steps)
    return f"{every} and at the end; the newest {config.checkpoint.keep:,} are kept"


def _every(num_steps: int) -> str:
    return "every step" if num_steps == 1 else f"every {num_steps:,} steps"
