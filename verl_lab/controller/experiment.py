"""One run folder at work: the lab, its data and its records, and moving between recorded states."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_lab.batch.columns import Batch
from verl_lab.config.load import dump_config
from verl_lab.config.schema import LabConfig
from verl_lab.controller.ahead import working_ahead
from verl_lab.controller.estimation import checked
from verl_lab.controller.history import History
from verl_lab.controller.lab import Lab
from verl_lab.controller.recipes import learn, recipe_of, sample
from verl_lab.controller.selftest import NUM_PROMPTS, self_test
from verl_lab.data.prompts import PromptSet, load_prompts
from verl_lab.errors import StateError, WorkerError
from verl_lab.models.load import load_tokenizer
from verl_lab.runtime.peer import Peer
from verl_lab.runtime.supervisor import Supervisor
from verl_lab.store.folder import RunFolder

log = logging.getLogger("experiment")


@dataclass(frozen=True)
class Sampled:
    """Samples made ahead of their step."""

    batch: Batch
    metrics: dict[str, float]


SAMPLED = (
    "sample_id", "response", "response_ids", "response_mask", "rollout_logprobs", "finish_reason",
    "weights_version",
)  # fmt: skip
"""The columns that a rollout adds."""


class Experiment:
    """What a run is made of, and the operations that its steps and its clients need."""

    def __init__(
        self, config: LabConfig, folder: RunFolder, supervisor: Supervisor, memory: Path
    ) -> None:
        self.folder = folder
        self.history = History(folder)
        self.supervisor = supervisor
        self.lab = Lab(
            config,
            supervisor,
            memory,
            on_span=self.history.span,
            on_event=lambda kind, text: self.history.event(kind, text, self.lab.step + 1),
        )
        supervisor.on_change = self._worker_changed
        self.prompts: PromptSet
        self.step_times: list[float] = []
        self._step_started: float | None = None  # unknown for a step made by hand
        self._pending: deque[dict[str, Any]] = deque()  # where in the data batches ahead begin
        self._is_tested = False

    @property
    def devices(self) -> list[str]:
        """What the workers run on."""
        return sorted({device for group in self.lab.groups for device in group.devices})

    async def open(
        self, functions: dict[str, bytes], *, parts: dict[str, float] | None, is_resume: bool
    ) -> None:
        """Starts the workers, and on a resume takes them back to the newest checkpoint."""
        self.folder.write_config(dump_config(checked(self.lab.config)))
        self.history.open()
        self.lab.functions = functions
        if parts is not None:
            self.lab.parts = parts
        self.prompts, _ = await asyncio.gather(self._load_prompts(), self.lab.start())
        self.lab.draw = self.prompts.train.next
        self.history.describe(
            devices=self.devices,
            data={
                "fingerprint": self.prompts.train.fingerprint,
                "num_prompts": len(self.prompts.train),
                "num_heldout": len(self.prompts.heldout),
                "num_too_long": self.prompts.num_too_long,
            },
        )
        await self.check_rewards()
        if is_resume:
            newest = self.history.newest()
            await self.return_to(newest, f"resume from {newest.name if newest else 'the start'}")
        else:
            self.history.begin(0, "start")
            await self._first_sync()
            self.lab.metrics.clear()

    async def check_rewards(self) -> None:
        """Raises if a reward function needs a column that the samples will not have."""
        if not self.lab.config.has_rollout:
            return
        names = {*self.prompts.train.peek(1).names, *SAMPLED}
        await self.lab.reward_group.check_columns(sorted(names))

    def close(self) -> None:
        """Closes the records."""
        self.history.close()

    async def prepare(self, cause: WorkerError | None = None) -> None:
        """Before the first step of a session: the self-test, and the evaluation to compare with.

        Where the trainer is gone, of `cause` if that is known, it first takes a new one back.
        """
        if not self.lab.has_trainer:
            gone = WorkerError("trainer-0", "was gone before the run began")
            await self.recover(cause or gone)
        samples = self.lab.config.samples_policy
        if samples and self.lab.step == 0 and not self._is_tested:
            self.history.record(0, await self_test(self.lab, self.prompts.train.peek(NUM_PROMPTS)))
            self.lab.metrics.clear()
        self._is_tested = True
        await self._evaluate_if_new()

    async def round_off(self) -> None:
        """After the last step: an evaluation and a checkpoint, where that step had none."""
        await self._evaluate_if_new()
        if not self.history.has_checkpoint(self.lab.step):
            await self.save()

    def begin_step(self) -> Batch:
        """Starts the clock of a step; returns its prompts."""
        self._step_started = time.perf_counter()
        return self.prompts.train.next(self.lab.config.prompts_per_step)

    async def run_recipe(self, prompts: Batch) -> Batch:
        """One step's stages."""
        return await recipe_of(self.lab.config)(self.lab, prompts)

    # --- with sampling ahead

    async def sample_ahead(self, step: int) -> Sampled:
        """Scored samples for a later step, by the newest weights."""
        self._pending.append(self.prompts.train.state())
        prompts = self.prompts.train.next(self.lab.config.prompts_per_step)
        with working_ahead(step) as ahead:
            async with self.lab.rollout_lock:
                await self.lab.load_published()
                batch = await sample(self.lab, prompts)
        return Sampled(batch, ahead.metrics)

    async def learn(self, sampled: Sampled) -> Batch:
        """Trains on samples made ahead, and publishes the weights."""
        self._step_started = self._step_started or time.perf_counter()
        lab, versions = self.lab, sampled.batch.numpy("weights_version")
        lab.metrics |= sampled.metrics
        lab.metrics |= {"rollout/staleness": lab.weights_version - float(versions.mean())}
        batch = await learn(lab, sampled.batch)
        await lab.publish_weights()
        self._pending.popleft()
        return batch

    def give_back(self) -> None:
        """Goes back in the data to the first samples that were not trained on."""
        if self._pending:
            self.history.event(
                "given_back",
                f"{len(self._pending)} batches sampled ahead were not trained on; their prompts "
                f"are drawn again",
                self.lab.step,
            )
            self.prompts.train.restore(self._pending[0])
            self._pending.clear()
        self._step_started = None

    async def finish_step(self, batch: Batch) -> None:
        """Records a step; evaluates and saves where that is due."""
        self.lab.step += 1
        step, config = self.lab.step, self.lab.config
        if self._step_started is not None:
            took = time.perf_counter() - self._step_started
            self.step_times = [*self.step_times[-9:], took]
            self.lab.metrics["time/step_s"] = took
            ahead = self.lab.config.pipeline.max_staleness > 0
            self._step_started = time.perf_counter() if ahead else None
        self.history.record(step, self.lab.metrics, batch)
        self.lab.metrics.clear()
        if self._evaluates and step % config.eval.every_steps == 0:
            await self.evaluate()
        if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0:
            await self.save()

    def eta_s(self, until: int) -> float | None:
        """The seconds until a step is finished; None before the first one is."""
        times = self.step_times
        return sum(times) / len(times) * (until - self.lab.step) if times else None

    async def evaluate(self) -> dict[str, float]:
        """Evaluates on the held-out prompts, and records it at the step last finished."""
        if not len(self.prompts.heldout):
            raise StateError(
                "evaluate: there are no held-out prompts; set data.heldout_size or "
                "data.heldout_path"
            )
        kept = dict(self.lab.metrics)
        metrics = await self.lab.evaluate(self.prompts.heldout)
        self.lab.metrics = kept
        self.history.record(self.lab.step, metrics)
        return metrics

    async def save(self, name: str | None = None) -> str:
        """Writes a checkpoint, or a snapshot if it has a name; returns its folder's name."""
        state = {
            "step": self.lab.step,
            "weights_version": self.lab.weights_version,
            "kl_coef": self.lab.kl_coef,
            "prompts": self._pending[0] if self._pending else self.prompts.train.state(),
        }
        keep = self.lab.config.checkpoint.keep
        folder = await self.history.save(name, state, self.lab.save, keep=keep)
        return folder.name

    async def return_to(self, folder: Path | None, reason: str) -> int:
        """Takes weights, optimizer, data and step back to a checkpoint; returns its step.

        Without a folder it is the start of the run, and the trainer must be a new one.
        """
        if folder is None:
            state: dict[str, Any] = {"step": 0, "weights_version": 0, "prompts": self.prompts.start}
        else:
            state = self.history.load_state(folder)
            await self.lab.load(folder / "trainer")
        self._pending.clear()
        self.prompts.train.restore(state["prompts"])
        self.lab.step = state["step"]
        self.lab.weights_version = state["weights_version"] - 1
        self.history.begin(self.lab.step, reason)
        algorithm = self.lab.config.algorithm
        adapts = algorithm.kl_target is not None
        self.lab.kl_coef = state.get("kl_coef", algorithm.kl_coef) if adapts else algorithm.kl_coef
        await self._first_sync()
        self.lab.metrics.clear()
        return self.lab.step

    async def _first_sync(self) -> None:
        if self.lab.config.has_rollout:
            await self.lab.sync_weights()

    async def recover(self, error: WorkerError) -> None:
        """Takes a new trainer back to the newest checkpoint, or to the start."""
        self.history.event("recovery", str(error), self.lab.step + 1)
        log.warning("recovering from: %s", error)
        await self.lab.restart_trainer()
        await self.return_to(self.history.newest(), f"recovery: {error.worker} {error.reason}")

    async def _evaluate_if_new(self) -> None:
        if self._evaluates and not self.history.has_evaluation(self.lab.step):
            await self.evaluate()

    @property
    def _evaluates(self) -> bool:
        """Whether evaluations are due at all; supervised data need not have a held-out part."""
        can = len(self.prompts.heldout) > 0 or self.lab.config.samples_policy
        return can and self.lab.config.eval.every_steps > 0

    async def _load_prompts(self) -> PromptSet:
        config = self.lab.config
        prompts = await asyncio.to_thread(
            lambda: load_prompts(config, load_tokenizer(config.model))
        )
        if prompts.num_too_long:
            self.history.event(
                "data",
                f"{prompts.num_too_long} prompts are longer than data.max_prompt_tokens="
                f"{config.data.max_prompt_tokens} and were left out",
                0,
            )
        if prompts.num_overlapping:
            self.history.event(
                "data",
                f"{prompts.num_overlapping} training prompts are in data.heldout_path too and were "
                f"left out of training",
                0,
            )
        return prompts

    def _worker_changed(self, event: str, peer: Peer) -> None:
        self.history.worker(event, peer, self.lab.step)
