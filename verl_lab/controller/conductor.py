"""What drives an experiment: a run in the background, and what clients ask in between.

Everything that changes the run happens at a step boundary. While steps run, what a client asks is
queued for the next boundary; otherwise it happens at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Literal

from verl_lab.batch.columns import Batch
from verl_lab.config.functions import loads
from verl_lab.config.load import dump_config, set_knob, value_of
from verl_lab.controller.estimation import checked
from verl_lab.controller.experiment import Experiment, Sampled
from verl_lab.controller.loop import synchronous
from verl_lab.controller.pipeline import pipelined
from verl_lab.errors import RewardError, StateError, WorkerError
from verl_lab.runtime.messages import describe_error
from verl_lab.runtime.peer import cancelled

log = logging.getLogger("conductor")
State = Literal["starting", "idle", "training", "paused", "stopping", "failed"]
MAX_RECOVERIES = 3
"""How often in a row, without a finished step between, the trainer may be restored."""


class Conductor:
    """The run under way, if any, and the calls that clients may make."""

    CALLS: ClassVar[set[str]] = {
        "ready", "train", "pause", "resume", "stop", "set", "set_rewards", "evaluate", "snapshot",
        "save", "rewind", "prompts", "stage", "sync_weights",
    }  # fmt: skip
    STAGES: ClassVar[tuple[str, ...]] = (
        "rollout", "score", "resample", "greedy_rewards", "reference_logprobs", "values",
        "advantages", "pairs", "update",
    )  # fmt: skip

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.runs: list[dict[str, Any]] = []
        self._config_wanted = experiment.lab.config
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._training: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._boundary: list[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = []
        self._busy = asyncio.Lock()
        self._go = asyncio.Event()
        self._is_stopping = False
        self._stepped_by_hand: Batch | None = None

    # --- life

    async def open(
        self, functions: dict[str, bytes], *, parts: dict[str, float] | None, is_resume: bool
    ) -> None:
        """Opens the experiment; `ready` waits for it, and raises what kept it from opening."""
        try:
            await self.experiment.open(functions, parts=parts, is_resume=is_resume)
        except Exception as error:  # carried to every client that waits for the start
            log.error("start failed\n%s", traceback.format_exc())
            self._opened.set_exception(error)
            self._opened.exception()
        else:
            self._opened.set_result(None)

    async def stop_well(self) -> None:
        """Ends a paused run with an evaluation and a checkpoint, and waits for it."""
        self.stop()
        if self._training is not None:
            await asyncio.wait([self._training])

    async def stop_working(self) -> None:
        """Ends a run under way where it is."""
        await cancelled(self._training)

    async def ready(self) -> None:
        """Waits until the session can be used."""
        await asyncio.shield(self._opened)

    @property
    def has_run(self) -> bool:
        """Whether a run has begun and not ended."""
        return self._training is not None and not self._training.done()

    @property
    def is_working(self) -> bool:
        """Whether the session must not end for want of a client: a run moves, or still starts."""
        return self.has_run and self.state != "paused"

    @property
    def state(self) -> State:
        """Where the session stands."""
        if not self._opened.done():
            return "starting"
        if self._opened.exception() is not None:
            return "failed"
        if not self.has_run:
            return "idle"
        if self._is_stopping:
            return "stopping"
        return "training" if self._go.is_set() or self._busy.locked() else "paused"

    def status(self) -> dict[str, Any]:
        """Where the run stands, in plain data."""
        lab = self.experiment.lab
        stage, done, total = lab.stage
        failure = self._opened.exception() if self._opened.done() else None
        return {
            "state": self.state,
            "step": lab.step,
            "steps_total": self.runs[-1]["until"] if self.runs else lab.config.steps,
            "stage": stage,
            "stage_done": done,
            "stage_total": total,
            "weights_version": lab.weights_version,
            "last": self.experiment.history.last,
            "eta_s": self.experiment.eta_s(self.runs[-1]["until"]) if self.has_run else None,
            "runs": self.runs,
            "workers": self.experiment.supervisor.describe(),
            "error": describe_error(failure) if failure else None,
        }

    # --- the run

    async def train(self, steps: int | None = None) -> int:
        """Begins to train in the background; returns the run's number."""
        await self.ready()
        if self.has_run:
            raise StateError("train: a run is under way; wait for it, or stop it first")
        lab = self.experiment.lab
        until = lab.config.steps if steps is None else lab.step + steps
        if until <= lab.step:
            raise StateError(
                f"train: nothing left to do, {lab.step} of {lab.config.steps} steps are done; "
                f"give a number of steps, or raise `steps` in the config"
            )
        self._is_stopping = False
        self._go.set()
        self.runs.append({"until": until, "outcome": None, "error": None})
        self._training = asyncio.create_task(self._train(until, self.runs[-1]), name="train")
        return len(self.runs) - 1

    def pause(self) -> None:
        """Halts the run at the next step boundary."""
        self._require_run("pause")
        self._go.clear()
        self._note("pause", "asked to pause")

    def resume(self) -> None:
        """Lets a paused run go on."""
        self._require_run("resume")
        self._go.set()
        self._note("resume", "asked to go on")

    def stop(self) -> None:
        """Ends the run at the next step boundary, with an evaluation and a checkpoint."""
        if self.has_run:
            self._is_stopping = True
            self._go.set()
            self._note("stop", "asked to stop")

    async def _train(self, until: int, run: dict[str, Any]) -> None:
        lab, recoveries, reached = self.experiment.lab, 0, -1
        cause: WorkerError | None = None
        try:
            while run["outcome"] is None:
                try:
                    async with self._busy:
                        await self.experiment.prepare(cause)
                    await (pipelined if self.max_staleness else synchronous)(self, until=until)
                    async with self._busy:
                        await self.experiment.round_off()
                    run["outcome"] = "stopped" if lab.step < until else "done"
                except WorkerError as error:
                    recoveries = recoveries + 1 if lab.step == reached else 1
                    reached, cause = lab.step, error
                    if lab.has_trainer or recoveries > MAX_RECOVERIES:
                        raise
            self._note(run["outcome"], f"after step {lab.step}")
        except Exception as error:  # carried to whoever waits for the run
            run["error"] = describe_error(error)
            run["outcome"] = "failed"
            self._note("failed", run["error"]["traceback"])
            log.error("run failed\n%s", run["error"]["traceback"])
        finally:
            await self._drain()

    # --- steps, as the loop drives them

    @property
    def step(self) -> int:
        """Steps finished."""
        return self.experiment.lab.step

    async def may_go_on(self) -> bool:
        """Waits while the run is paused; False when it was asked to stop."""
        while not self._go.is_set():
            await self._drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._go.wait(), timeout=0.1)
        return not self._is_stopping

    async def before_step(self) -> None:
        """Does what clients asked for since the last step."""
        await self._drain()

    def next_prompts(self) -> Batch:
        """The prompts of the next step."""
        return self.experiment.begin_step()

    async def run_recipe(self, prompts: Batch) -> Batch:
        """One step's stages."""
        async with self._busy:
            return await self.experiment.run_recipe(prompts)

    @property
    def max_staleness(self) -> int:
        """Steps that sampling may be ahead."""
        return self.experiment.lab.config.pipeline.max_staleness

    async def sample(self, step: int) -> Sampled:
        """Scored samples for a later step."""
        return await self.experiment.sample_ahead(step)

    async def learn(self, samples: Sampled) -> Batch:
        """Trains on them, and publishes the weights."""
        async with self._busy:
            return await self.experiment.learn(samples)

    def give_back(self) -> None:
        """Takes note that samples which were not trained on are thrown away."""
        self.experiment.give_back()

    async def finish_step(self, batch: Batch) -> None:
        """Records a step; evaluates and saves where that is due."""
        async with self._busy:
            await self.experiment.finish_step(batch)

    # --- what a client may do between steps

    async def set(
        self, changes: dict[str, Any], own: dict[str, dict[str, str]] | None = None
    ) -> int:
        """Changes live knobs; returns the first step that has them.

        Args:
            changes: values by dotted key.
            own: the user's own functions that they name, pickled.
        """
        await self.ready()
        loads(own or {})
        config = self._config_wanted = checked(set_knob(self._config_wanted, changes))

        async def apply() -> None:
            lab, history = self.experiment.lab, self.experiment.history
            if own:
                await lab.add_functions(own)
            if "algorithm.kl_coef" in changes:
                lab.kl_coef = config.algorithm.kl_coef
            for key, value in changes.items():
                history.intervention(lab.step + 1, key, value_of(lab.config, key), value)
            lab.config = config
            self.experiment.folder.write_config(dump_config(config))

        self._at_boundary(apply)
        return self.step + (2 if self.state == "training" else 1)

    async def set_rewards(self, parts: dict[str, float], functions: dict[str, bytes]) -> None:
        """Scores with other reward parts from the next step on."""
        await self.ready()

        async def apply() -> None:
            lab = self.experiment.lab
            old = lab.parts
            before = lab.functions
            await lab.set_rewards(parts, functions)
            try:
                await self.experiment.check_rewards()
            except RewardError:
                await lab.set_rewards(old, before)
                raise
            self.experiment.history.intervention(lab.step + 1, "reward.parts", old, parts)

        await self._at_boundary(apply)

    async def evaluate(self) -> dict[str, float]:
        """Evaluates on the held-out prompts, and records it."""
        await self.ready()
        return await self._at_boundary(self.experiment.evaluate)  # type: ignore[no-any-return]

    async def snapshot(self, name: str | None = None) -> str:
        """Saves all that a rewind needs; returns the snapshot's name."""
        await self.ready()
        name = self.experiment.history.snapshot_name(name)
        return await self._at_boundary(  # type: ignore[no-any-return]
            lambda: self.experiment.save(name)
        )

    async def save(self) -> str:
        """Saves a checkpoint of the step last finished, if it has none; returns its name."""
        await self.ready()

        async def work() -> str:
            step = self.experiment.lab.step
            if self.experiment.history.has_checkpoint(step):
                return f"step-{step:06d}"
            return await self.experiment.save()

        return await self._at_boundary(work)  # type: ignore[no-any-return]

    async def rewind(self, to: str | int) -> int:
        """Goes back to a snapshot or a checkpointed step; returns that step."""
        await self.ready()
        folder = self.experiment.history.find(to)
        return await self._at_boundary(  # type: ignore[no-any-return]
            lambda: self.experiment.return_to(folder, f"rewind to {to}")
        )

    # --- single stages, for stepping by hand

    async def prompts(self, n: int | None = None) -> Batch:
        """Draws the next prompts."""
        await self._free("prompts")
        lab = self.experiment.lab
        return self.experiment.prompts.train.next(n or lab.config.prompts_per_step)

    async def stage(self, name: str, batch: Batch) -> Batch:
        """One stage of `Lab` by its name; see there.

        An update ends the step where nothing is sampled, so that no weights are synchronised.
        """
        if name not in self.STAGES:
            raise StateError(f"{name}: no such stage; use one of {', '.join(self.STAGES)}")
        await self._free(name)
        async with self._busy:
            found = getattr(self.experiment.lab, name)(batch)
            batch = await found if asyncio.iscoroutine(found) else found
        if name == "update":
            self._stepped_by_hand = batch
            if not self.experiment.lab.config.samples_policy:
                await self._end_step()
        return batch

    async def sync_weights(self) -> int:
        """See `Lab.sync_weights`; after an update it ends the step made by hand, and records it."""
        await self._free("sync_weights")
        async with self._busy:
            version = await self.experiment.lab.sync_weights()
        await self._end_step()
        return version

    async def _end_step(self) -> None:
        if self._stepped_by_hand is not None:
            batch, self._stepped_by_hand = self._stepped_by_hand, None
            await self.finish_step(batch)

    # --- inner workings

    def _at_boundary(self, work: Callable[[], Awaitable[Any]]) -> asyncio.Future[Any]:
        """Does `work` now, or while a run is under way at its next step boundary."""
        future = asyncio.get_running_loop().create_future()
        self._boundary.append((work, future))
        if not self.has_run:
            self._draining = asyncio.create_task(self._drain())
        return future

    async def _drain(self) -> None:
        while self._boundary:
            work, future = self._boundary.pop(0)
            async with self._busy:
                try:
                    result = await work()
                except Exception as error:  # carried to the client that asked
                    future.set_exception(error)
                    future.exception()
                else:
                    if not future.done():
                        future.set_result(result)

    async def _free(self, what: str) -> None:
        await self.ready()
        if self.state not in ("idle", "paused"):
            raise StateError(f"{what}: a run is under way; pause or stop it to step by hand")
        if not self.experiment.lab.has_trainer:
            await self.experiment.recover(WorkerError("trainer-0", f"was gone before `{what}`"))

    def _require_run(self, what: str) -> None:
        if not self.has_run:
            raise StateError(f"{what}: no run is under way; begin one with train()")

    def _note(self, kind: str, text: str) -> None:
        self.experiment.history.event(kind, text, self.step)
