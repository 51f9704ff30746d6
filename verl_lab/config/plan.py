"""The resolved plan of a config: how many samples, who runs where. Computed, never started."""

from __future__ import annotations

from dataclasses import dataclass

from verl_lab.config.devices import Device, resolve_devices
from verl_lab.config.presets import describe_recipe
from verl_lab.config.schema import LabConfig


@dataclass(frozen=True)
class PlannedWorker:
    """One process that a session would start."""

    name: str
    device: Device
    detail: str


@dataclass(frozen=True)
class Plan:
    """What a config comes to."""

    recipe: str
    """What the recipe sets, in a line."""
    steps: int
    samples_per_step: int
    prompts_per_step: int
    group_size: int
    updates_per_step: int
    workers: list[PlannedWorker]
    shared: list[tuple[str, str]]
    """Pairs of workers that share hardware and so take turns."""

    @property
    def total_samples(self) -> int:
        """Samples of the whole run."""
        return self.steps * self.samples_per_step

    def describe(self) -> str:
        """The plan as a table in plain text."""
        samples, updates = self.samples_per_step, self.updates_per_step
        responses = f"{self.group_size} response{'s' * (self.group_size > 1)}"
        groups = f"{self.prompts_per_step} prompts x {responses}"
        rows = [
            ("recipe", self.recipe),
            ("a step", f"{samples} samples = {groups}"),
            ("", f"{updates} update{'s' * (updates > 1)} of {samples // updates} samples"),
            ("the run", f"{self.steps} steps, {self.total_samples:,} samples"),
        ]
        rows += [(w.name, f"{w.device!s:10} {w.detail}") for w in self.workers]
        rows += [("take turns", f"{one} and {other}") for one, other in self.shared]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def plan(config: LabConfig) -> Plan:
    """The plan of a config on this machine.

    Raises:
        DeviceError: a device is missing; says what there is.
    """
    devices = resolve_devices(config)
    num_rollout = len(devices.get("rollout", "1"))
    share = -(-config.rollout.rollout_batch_size // num_rollout)
    details = {
        "rollout": f"{share} sequences in flight, {config.rollout.engine} engine",
        "trainer": f"{config.trainer.micro_batch_tokens} tokens a micro-batch",
        "reward": f"{config.reward.timeout_s:g} s a call",
        "reward_model": "" if config.reward_model is None else config.reward_model.name_or_path,
    }
    workers = [
        PlannedWorker(f"{role}-{i}", device, details[role])
        for role, group in devices.items()
        for i, device in enumerate(group)
    ]
    heavy = [worker for worker in workers if not worker.name.startswith("reward-")]
    return Plan(
        recipe=describe_recipe(config.recipe, config.model_dump()),
        steps=config.steps,
        samples_per_step=config.trainer.train_batch_size,
        prompts_per_step=config.prompts_per_step,
        group_size=config.samples_per_prompt,
        updates_per_step=config.trainer.updates_per_step,
        workers=workers,
        shared=[
            (one.name, other.name)
            for i, one in enumerate(heavy)
            for other in heavy[i + 1 :]
            if one.device.overlaps(other.device)
        ],
    )
