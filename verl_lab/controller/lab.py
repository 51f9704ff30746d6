"""The lab: the worker groups of one session, and a step's stages over them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_lab.algos.advantages import constant_groups, group_advantages
from verl_lab.batch.columns import Batch
from verl_lab.config.devices import resolve_devices
from verl_lab.config.schema import LabConfig
from verl_lab.controller.groups import RewardGroup, RolloutGroup, ScoreCounts, TrainerGroup
from verl_lab.engines.rollout.base import Sampling
from verl_lab.engines.trainer.base import UpdateSettings
from verl_lab.engines.weights import remove_version
from verl_lab.errors import StateError
from verl_lab.rewards.compose import combine
from verl_lab.runtime.peer import Peer, gather
from verl_lab.runtime.supervisor import Supervisor

GREEDY_SEED_STEP = 0
"""Evaluations sample with the key of step 0; training steps count from 1."""


class Lab:
    """Stages as methods; what they measured collects in `metrics` until the step is recorded.

    `on_span(worker, device, kind, step, start, end)` and `on_event(kind, text)` write things down.
    """

    def __init__(
        self,
        config: LabConfig,
        supervisor: Supervisor,
        memory: Path,
        *,
        on_span: Callable[[str, str, str, int, float, float], None],
        on_event: Callable[[str, str], None],
    ) -> None:
        self.config = config
        self.step = 0
        self.weights_version = -1
        self.metrics: dict[str, float] = {}
        self.stage: tuple[str, int, int] = ("", 0, 0)
        self.functions: dict[str, bytes] = {}
        self.parts: dict[str, float] = reward_parts(config)
        self._memory, self._on_span, self._on_event = memory, on_span, on_event
        self._has_reference = False
        self._num_syncs = 0
        devices = {role: [str(d) for d in found] for role, found in resolve_devices(config).items()}
        self.rollout_group = RolloutGroup(devices["rollout"], supervisor)
        self.trainer_group = TrainerGroup(devices["trainer"], supervisor)
        self.reward_group = RewardGroup(devices["reward"], supervisor)

    # --- life

    async def start(self) -> None:
        """Starts all workers at the same time."""
        config = self.config.model_dump(mode="json")
        await gather(
            self.rollout_group.start({"config": config}),
            self.trainer_group.start({"config": config}),
            self.reward_group.start({"config": config, "functions": self.functions}),
        )

    @property
    def has_trainer(self) -> bool:
        """Whether the policy's process is alive."""
        return all(peer.is_alive for peer in self.trainer_group.peers)

    async def restart_trainer(self) -> None:
        """Replaces a trainer that died by one with the initial weights."""
        await self.trainer_group.revive(self.trainer_group.names[0])
        self._has_reference = False

    async def set_rewards(self, parts: dict[str, float], functions: dict[str, bytes]) -> None:
        """Scores with other parts from the next step on."""
        self.parts, self.functions = parts, functions
        config = self.config.model_dump(mode="json")
        await self.reward_group.replace_functions({"config": config, "functions": functions})

    # --- the stages of a step

    async def rollout(self, prompts: Batch) -> Batch:
        """Samples `rollout.group_size` responses per prompt from the weights last loaded."""
        with self._stage("rollout"):
            batch = await self._generate(prompts, self._sampling(), step=self.step + 1)
        lengths = np.array([len(ids) for ids in batch.lists("response_ids")])
        reasons = batch["finish_reason"]
        self.metrics |= {
            "rollout/response_tokens": float(lengths.mean()),
            "rollout/truncated_fraction": reasons.count("length") / len(batch),
            "rollout/staleness": self.weights_version - float(np.mean(batch["weights_version"])),
            "rollout/tokens_per_s": float(lengths.sum()) / self.metrics["time/rollout_s"],
        }
        return batch

    async def score(self, batch: Batch) -> Batch:
        """Adds a column a reward part, and their weighted sum as `reward`."""
        with self._stage("reward"):
            batch, counts = await self._score(batch)
        rewards = batch.numpy("reward")
        self.metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        for part in self.parts:
            self.metrics[f"reward/{part}"] = float(batch.numpy(f"reward/{part}").mean())
        self.metrics |= {"reward/timeouts": counts.timeouts, "reward/errors": counts.errors}
        return batch

    async def reference_logprobs(self, batch: Batch) -> Batch:
        """Adds `ref_logprobs`, of the policy as it was before training."""
        with self._stage("reference"):
            if not self._has_reference:
                await self._train("load_reference")
                self._has_reference = True
            return await self._train(  # type: ignore[no-any-return]
                "ref_logprobs",
                batch,
                self.config.rollout.temperature,
                self.config.trainer.micro_batch_tokens,
            )

    def advantages(self, batch: Batch) -> Batch:
        """Adds `advantages`: each response's estimate on all of its tokens."""
        rewards = torch.from_numpy(batch.numpy("reward").copy())
        groups = torch.from_numpy(batch.numpy("group_id").copy())
        algorithm = self.config.algorithm
        values = group_advantages(
            rewards, groups, baseline=algorithm.baseline, scale=algorithm.scale
        ).tolist()
        self.metrics["reward/constant_groups"] = constant_groups(rewards, groups)
        lengths = [len(ids) for ids in batch.lists("response_ids")]
        return batch.with_columns(
            {"advantages": [[value] * n for value, n in zip(values, lengths, strict=True)]}
        )

    async def update(self, batch: Batch) -> Batch:
        """Trains the policy on the batch."""
        settings = UpdateSettings.from_config(self.config)
        with self._stage("train"):
            batch, metrics = await self._train("update", batch, settings.to_dict())
        self.metrics |= metrics
        return batch

    async def sync_weights(self) -> int:
        """Publishes the trainer's weights, loads them in every rollout worker, and compares both.

        Raises:
            StateError: a rollout worker holds other weights than the trainer published.
        """
        with self._stage("sync"):
            version = self.weights_version + 1
            self._num_syncs += 1  # a rewind publishes a version again
            folder = self._memory / f"weights-{version}-{self._num_syncs}"
            published = await self._train("publish", folder, version)
            before = self.rollout_group.weights
            loaded = await self.rollout_group.load_weights(folder)
        for name, held in zip(self.rollout_group.names, loaded, strict=True):
            if held["hash"] != published["hash"] or held["version"] != version:
                raise StateError(
                    f"{name}: holds weights {held['version']} with hash {held['hash']} after a "
                    f"sync, the "
                    f"trainer published {version} with hash {published['hash']}; stop and report "
                    f"this"
                )
        if before is not None:
            remove_version(before)
        self.weights_version = version
        self.metrics["weights/bytes"] = published["bytes"]
        return version

    # --- around the steps

    async def evaluate(self, heldout: Batch) -> dict[str, float]:
        """Metrics of the current policy on held-out prompts, one response each."""
        prompts = heldout.slice(0, self.config.eval.num_prompts)
        sampling = {
            **self._sampling(),
            "group_size": 1,
            "temperature": self.config.eval.temperature,
            "top_p": 1.0,
            "top_k": 0,
        }
        with self._stage("eval"):
            batch = await self._generate(prompts, sampling, step=GREEDY_SEED_STEP)
            batch, _ = await self._score(batch)
        metrics = {"eval/reward": float(batch.numpy("reward").mean())}
        if "task" in self.parts:
            metrics["eval/accuracy"] = float((batch.numpy("reward/task") >= 1).mean())
        lengths = [len(ids) for ids in batch.lists("response_ids")]
        return {**metrics, "eval/response_tokens": float(np.mean(lengths))}

    async def old_logprobs(self, batch: Batch) -> Batch:
        """Adds `old_logprobs`: what the trainer gives to the sampled tokens now."""
        return await self._train(  # type: ignore[no-any-return]
            "logprobs",
            batch,
            self.config.rollout.temperature,
            self.config.trainer.micro_batch_tokens,
        )

    async def save(self, folder: Path) -> None:
        """Writes the trainer's state into a folder."""
        with self._stage("save"):
            await self._train("save", folder)

    async def load(self, folder: Path) -> None:
        """Takes the trainer back to a saved state."""
        with self._stage("load"):
            await self._train("load", folder)

    # --- below the stages

    def _sampling(self) -> dict[str, Any]:
        return Sampling.from_config(self.config).to_dict()

    async def _generate(self, prompts: Batch, sampling: dict[str, Any], *, step: int) -> Batch:
        return await self.rollout_group.generate(
            prompts,
            sampling,
            step=step,
            slots=self.config.rollout.rollout_batch_size,
            progress=self._progress,
            span=self._span,
        )

    async def _score(self, batch: Batch) -> tuple[Batch, ScoreCounts]:
        total, scores = ScoreCounts(), {}
        for part in self.parts:
            scores[part], counts = await self.reward_group.score(
                batch, part, self.config, progress=self._progress, span=self._span
            )
            total.timeouts += counts.timeouts
            total.errors += counts.errors
            if counts.traceback:
                self._on_event("reward_error", f"reward part {part}:\n{counts.traceback}")
        columns = {f"reward/{part}": values for part, values in scores.items()}
        return batch.with_columns({**columns, "reward": combine(scores, self.parts)}), total

    async def _train(self, method: str, *args: Any) -> Any:
        return await self.trainer_group.call(
            method, *args, span=self._span, progress=self._progress
        )

    def _stage(self, name: str) -> _Stage:
        return _Stage(self, name)

    def _progress(self, done: int, total: int) -> None:
        self.stage = (self.stage[0], done, total)

    def _span(self, peer: Peer, kind: str, start: float, end: float) -> None:
        self._on_span(peer.name, peer.device, kind, self.step + 1, start, end)


class _Stage:
    """Shows a stage while it runs and measures how long it took."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab, self._name = lab, name

    def __enter__(self) -> None:
        self._lab.stage = (self._name, 0, 0)
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._lab.metrics[f"time/{self._name}_s"] = time.perf_counter() - self._start
        self._lab.stage = ("", 0, 0)


def reward_parts(config: LabConfig) -> dict[str, float]:
    """Weight per reward part; the task's verifier where the config names none."""
    parts = dict(config.reward.parts)
    if not parts and config.task is not None:
        parts = {"task": 1.0}
    if config.reward_model is not None:
        parts["reward_model"] = config.reward_model.weight
    return parts
