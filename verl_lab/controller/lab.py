"""The lab: the worker groups of one session, and a step's stages over them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_lab.algos.advantages import constant_groups
from verl_lab.algos.kl import adapted_coefficient
from verl_lab.batch.columns import Batch
from verl_lab.config.devices import resolve_devices
from verl_lab.config.functions import loads
from verl_lab.config.schema import LabConfig
from verl_lab.controller.ahead import ahead_of_turn
from verl_lab.controller.estimation import best_and_worst, with_advantages
from verl_lab.controller.evaluation import GREEDY_SEED_STEP, evaluate
from verl_lab.controller.groups import Group, RolloutGroup, TrainerGroup
from verl_lab.controller.published import PublishedWeights
from verl_lab.controller.resampling import resample
from verl_lab.controller.reward_group import RewardGroup, RewardModelGroup, ScoreCounts
from verl_lab.data.examples import as_prompts
from verl_lab.engines.rollout.base import Sampling
from verl_lab.engines.trainer.base import UpdateSettings
from verl_lab.errors import StateError
from verl_lab.rewards.compose import combine
from verl_lab.rewards.lengths import LENGTH_PARTS, length_parts
from verl_lab.runtime.peer import Peer, gather
from verl_lab.runtime.supervisor import Supervisor


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
        self.kl_coef = config.algorithm.kl_coef
        self.draw: Callable[[int], Batch] = _no_prompts
        """Draws so many more prompts."""
        self.rollout_lock = asyncio.Lock()
        """Held while rollout workers take over weights and sample by them."""
        self._metrics: dict[str, float] = {}
        self.stage: tuple[str, int, int] = ("", 0, 0)
        self.functions: dict[str, bytes] = {}
        self.own: dict[str, dict[str, str]] = {}
        """The user's own functions that the config names, by kind and name."""
        self.parts: dict[str, float] = reward_parts(config)
        self._on_span, self.note = on_span, on_event
        self.weights = PublishedWeights(memory)
        self._has_reference = False
        self._is_behind = False
        devices = {role: [str(d) for d in found] for role, found in resolve_devices(config).items()}
        self.rollout_group = RolloutGroup(devices.get("rollout", []), supervisor)
        self.trainer_group = TrainerGroup(devices["trainer"], supervisor)
        self.reward_group = RewardGroup(devices.get("reward", []), supervisor)
        self.reward_model_group = RewardModelGroup(devices.get("reward_model", []), supervisor)

    @property
    def metrics(self) -> dict[str, float]:
        """What the stages measured since the last step was recorded, or of the step ahead."""
        ahead = ahead_of_turn()
        return self._metrics if ahead is None else ahead.metrics

    @metrics.setter
    def metrics(self, values: dict[str, float]) -> None:
        known = self.metrics
        if values is not known:
            known.clear()
            known.update(values)

    @property
    def next_step(self) -> int:
        """The step that the stages work on."""
        ahead = ahead_of_turn()
        return self.step + 1 if ahead is None else ahead.step

    # --- life

    @property
    def groups(self) -> list[Group]:
        """The groups that the recipe has workers of."""
        every = (
            self.rollout_group, self.trainer_group, self.reward_group, self.reward_model_group
        )  # fmt: skip
        return [group for group in every if group.names]

    async def start(self) -> None:
        """Starts all workers at the same time."""
        config = self.config.model_dump(mode="json")
        more: dict[str, dict[str, Any]] = {
            "trainer": {"functions": self.own},
            "reward": {"functions": self.functions},
        }
        await gather(
            *(group.start({"config": config, **more.get(group.role, {})}) for group in self.groups)
        )

    async def add_functions(self, own: dict[str, dict[str, str]]) -> None:
        """Makes functions of the user's own known by name, here and in the trainer."""
        loads(own)
        self.own = {**self.own, **{kind: {**self.own.get(kind, {}), **own[kind]} for kind in own}}
        await self.train("add_functions", own)

    @property
    def has_trainer(self) -> bool:
        """Whether the policy's process is alive."""
        return all(peer.is_alive for peer in self.trainer_group.peers)

    async def restart_trainer(self) -> None:
        """Replaces a trainer that died by one with the initial weights."""
        await self.trainer_group.revive(self.trainer_group.names[0])
        self._has_reference = False
        if self.own:
            await self.train("add_functions", self.own)

    async def set_rewards(self, parts: dict[str, float], functions: dict[str, bytes]) -> None:
        """Scores with other parts from the next step on."""
        self.parts, self.functions = parts, functions
        config = self.config.model_dump(mode="json")
        await self.reward_group.replace_functions({"config": config, "functions": functions})

    # --- the stages of a step

    async def rollout(self, prompts: Batch) -> Batch:
        """Samples `rollout.group_size` responses per prompt from the weights last loaded."""
        self._require(self.config.has_rollout, "rollout")
        with self.timed("rollout"):
            started = time.perf_counter()
            batch = await self.generate(prompts, self.sampling(), step=self.next_step)
            took = time.perf_counter() - started
        lengths = np.array([len(ids) for ids in batch.lists("response_ids")])
        reasons = batch["finish_reason"]
        self.metrics |= {
            "rollout/response_tokens": float(lengths.mean()),
            "rollout/truncated_fraction": reasons.count("length") / len(batch),
            "rollout/staleness": self.weights_version - float(np.mean(batch["weights_version"])),
            "rollout/tokens_per_s": float(lengths.sum()) / took,
        }
        return batch

    async def score(self, batch: Batch) -> Batch:
        """Adds a column a reward part, and their weighted sum as `reward`."""
        self._require(bool(self.parts), "score")
        with self.timed("reward"):
            batch, counts = await self.score_parts(batch)
        rewards = batch.numpy("reward")
        groups = torch.from_numpy(batch.numpy("group_id").copy())
        self.metrics |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/constant_groups": constant_groups(torch.from_numpy(rewards.copy()), groups),
        }
        for part in self.parts:
            self.metrics[f"reward/{part}"] = float(batch.numpy(f"reward/{part}").mean())
        self.metrics |= {"reward/timeouts": counts.timeouts, "reward/errors": counts.errors}
        return batch

    async def resample(self, batch: Batch) -> Batch:
        """Replaces groups whose rewards are all equal by groups of other prompts; see
        `resampling`."""
        return await resample(self, batch)

    async def greedy_rewards(self, batch: Batch) -> Batch:
        """Adds `greedy_reward`: that of the likeliest response to the same prompt (ReMax)."""
        groups = batch.groups()
        prompts = as_prompts(batch.take([rows[0] for rows in groups.values()]))
        sampling = {**self.sampling(), "group_size": 1, "temperature": 0.0}
        with self.timed("rollout"):
            greedy = await self.generate(prompts, sampling, step=GREEDY_SEED_STEP)
        with self.timed("reward"):
            greedy, _ = await self.score_parts(greedy)
        rewards = dict(zip(greedy["group_id"], greedy["reward"], strict=True))
        self.metrics["reward/greedy"] = float(np.mean(list(rewards.values())))
        return batch.with_columns({"greedy_reward": [rewards[g] for g in batch["group_id"]]})

    async def reference_logprobs(self, batch: Batch) -> Batch:
        """Adds `ref_logprobs`, of the policy as it was before training."""
        with self.timed("reference"):
            if not self._has_reference:
                await self.train("load_reference")
                self._has_reference = True
            return await self.train(  # type: ignore[no-any-return]
                "ref_logprobs", batch, self._temperature, self.config.trainer.micro_batch_tokens
            )

    async def values(self, batch: Batch) -> Batch:
        """Adds `values`: the critic's, of the state before each sampled token."""
        with self.timed("values"):
            return await self.train(  # type: ignore[no-any-return]
                "values", batch, self.config.trainer.micro_batch_tokens
            )

    def advantages(self, batch: Batch) -> Batch:
        """Adds `advantages`, a value a token, by the estimator that the config names."""
        found = with_advantages(batch, self.config, self.parts, self.kl_coef)
        self.metrics |= found.metrics
        return found.batch

    def pairs(self, batch: Batch) -> Batch:
        """The best and the worst sample of each group whose rewards differ, with `is_chosen`."""
        found = best_and_worst(batch)
        self.metrics["preference/pairs"] = len(found) // 2
        return found

    async def update(self, batch: Batch) -> Batch:
        """Trains on the batch."""
        settings = UpdateSettings.from_config(self.config, step=self.step + 1, kl_coef=self.kl_coef)
        with self.timed("train"):
            batch, metrics = await self.train("update", batch, settings.to_dict())
        self._is_behind = True
        self.metrics |= metrics
        self._adapt(len(batch))
        return batch

    async def sync_weights(self) -> int:
        """Publishes the trainer's weights, loads them in every rollout worker, and compares both.

        Raises:
            StateError: a rollout worker holds other weights than the trainer published.
        """
        await self.publish_weights()
        await self.load_published()
        return self.weights_version

    async def publish_weights(self) -> None:
        """Writes the trainer's weights as a new version, which no rollout worker has yet."""
        self._require(self.config.has_rollout, "sync_weights")
        with self.timed("sync"):
            found = await self.weights.publish(self.weights_version + 1, self.train)
        self.weights_version, self._is_behind = found["version"], False
        self.metrics["weights/bytes"] = found["bytes"]

    async def load_published(self) -> None:
        """Brings the rollout workers to the newest version, and compares what they hold."""
        with self.timed("sync"):
            await self.weights.load(self.rollout_group, self._span)

    async def catch_up(self) -> None:
        """Brings the rollout workers to the weights as they were trained last."""
        if self._is_behind:
            await self.publish_weights()
        await self.load_published()

    # --- around the steps

    async def evaluate(self, heldout: Batch) -> dict[str, float]:
        """Metrics of what is trained on held-out data; see `evaluation`."""
        with self.timed("eval"):
            return await evaluate(self, heldout)

    async def old_logprobs(self, batch: Batch) -> Batch:
        """Adds `old_logprobs`: what the trainer gives to the sampled tokens now."""
        temperature, tokens = (
            self.config.rollout.temperature,
            self.config.trainer.micro_batch_tokens,
        )
        return await self.train("logprobs", batch, temperature, tokens)  # type: ignore[no-any-return]

    async def save(self, folder: Path) -> None:
        """Writes the trainer's state into a folder."""
        with self.timed("save"):
            await self.train("save", folder)

    async def load(self, folder: Path) -> None:
        """Takes the trainer back to a saved state."""
        with self.timed("load"):
            await self.train("load", folder)

    # --- below the stages

    @property
    def _temperature(self) -> float:
        """Of log-probabilities: that of sampling, or 1 for responses that are only compared."""
        return self.config.rollout.temperature if self.config.objective == "policy" else 1.0

    def _adapt(self, num_samples: int) -> None:
        """Moves an adaptive KL coefficient by the KL just measured."""
        algorithm = self.config.algorithm
        if algorithm.kl_target is None:
            self.kl_coef = algorithm.kl_coef
            return
        self.metrics["policy/kl_coef"] = self.kl_coef
        if math.isfinite(self.metrics.get("policy/kl_ref", math.nan)):
            self.kl_coef = adapted_coefficient(
                self.kl_coef,
                self.metrics["policy/kl_ref"],
                target=algorithm.kl_target,
                num_samples=num_samples,
            )

    def _require(self, is_there: bool, stage: str) -> None:
        if not is_there:
            what = "has no rollout workers" if stage != "score" else "has nothing that scores"
            raise StateError(f"{stage}: recipe {self.config.recipe} {what} in this session")

    def sampling(self) -> dict[str, Any]:
        """How a training step samples."""
        return Sampling.from_config(self.config).to_dict()

    async def generate(self, prompts: Batch, sampling: dict[str, Any], *, step: int) -> Batch:
        """Responses to prompts from the weights last loaded, keyed by `step`."""
        return await self.rollout_group.generate(
            prompts,
            sampling,
            step=step,
            slots=self.config.rollout.rollout_batch_size,
            progress=self._progress,
            span=self._span,
        )

    async def score_parts(self, batch: Batch) -> tuple[Batch, ScoreCounts]:
        """Adds a column a reward part and `reward`; says what went wrong on the way."""
        total, scores = ScoreCounts(), {}
        lengths = np.array([len(ids) for ids in batch.lists("response_ids")])
        for part in self.parts:
            if part in LENGTH_PARTS and part not in self.functions:
                scores[part] = length_parts(
                    part,
                    lengths,
                    max_new_tokens=self.config.rollout.max_new_tokens,
                    overlong_buffer=self.config.reward.overlong_buffer,
                )
                continue
            group = self.reward_model_group if part == "reward_model" else self.reward_group
            scores[part], counts = await group.score(
                batch, part, self.config, progress=self._progress, span=self._span
            )
            total.timeouts += counts.timeouts
            total.errors += counts.errors
            if counts.traceback:
                self.note("reward_error", f"reward part {part}:\n{counts.traceback}")
        columns = {f"reward/{part}": values for part, values in scores.items()}
        return batch.with_columns({**columns, "reward": combine(scores, self.parts)}), total

    async def train(self, method: str, *args: Any) -> Any:
        """The result of a method of the trainer."""
        return await self.trainer_group.call(
            method, *args, span=self._span, progress=self._progress
        )

    def timed(self, name: str) -> _Stage:
        """Shows a stage, and measures how long it takes."""
        return _Stage(self, name)

    def _progress(self, done: int, total: int) -> None:
        self.stage = (self.stage[0], done, total)

    def _span(self, peer: Peer, kind: str, start: float, end: float) -> None:
        self._on_span(peer.name, peer.device, kind, self.next_step, start, end)


class _Stage:
    """Shows a stage while it runs and measures how long it took."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab, self._name = lab, name

    def __enter__(self) -> None:
        self._lab.stage = (self._name, 0, 0)
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        key, took = f"time/{self._name}_s", time.perf_counter() - self._start
        self._lab.metrics[key] = self._lab.metrics.get(key, 0.0) + took
        self._lab.stage = ("", 0, 0)


def _no_prompts(n: int) -> Batch:
    raise StateError(f"prompts: {n} more were asked for, and the session has none yet")


def reward_parts(config: LabConfig) -> dict[str, float]:
    """Weight per reward part; the task's verifier where the config names none."""
    parts = dict(config.reward.parts)
    if not parts and config.task is not None:
        parts = {"task": 1.0}
    if not config.has_rollout:
        return {}
    if config.reward_model is not None:
        parts.setdefault("reward_model", 1.0)
    return parts
