"""A session: rollout, reward and trainer processes on the devices you chose, and what you ask of
them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from verl_lab.batch.columns import Batch
from verl_lab.config.devices import resolve_devices
from verl_lab.config.functions import dumps, functions_named
from verl_lab.config.load import load_config, start_problems
from verl_lab.config.schema import LabConfig
from verl_lab.config.sources import with_pinned_models
from verl_lab.data.tasks import task_problems
from verl_lab.errors import ConfigError, DeadlineError, LabError, StateError, WorkerError
from verl_lab.runtime import folder as runtime
from verl_lab.session import launch
from verl_lab.session.client import Client
from verl_lab.session.frontend import KEEP_ALIVE_S, frontend, owner
from verl_lab.session.rewards import RewardParts, as_parts
from verl_lab.session.run import Run
from verl_lab.session.view import session_html
from verl_lab.store.database import Reader
from verl_lab.store.folder import RunFolder
from verl_lab.store.samples import SampleStore
from verl_lab.store.timeline import utilisation

if TYPE_CHECKING:
    import pandas as pd

CLOSE_S = 10.0
"""Longest time a controller may take to leave before it is killed."""


class Session:
    """A lab of your own: its processes start in the background as soon as it is made.

    ```python
    s = Session("configs/quickstart.yaml", "trainer.learning_rate=3e-4")
    run = s.train(steps=50)      # returns at once
    run.metrics                  # a DataFrame, while it runs
    s.set("rollout.temperature", 0.9)
    run.wait()
    s.close()
    ```
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | LabConfig | None = None,
        *overrides: str,
        reward: RewardParts | None = None,
        resume: str | Path | None = None,
        keep_alive_s: float | None = None,
    ) -> None:
        """Checks everything that can be checked without a process, and starts them.

        Args:
            config: a YAML file, or the same as a mapping. A resumed run brings its own.
            overrides: `dotted.key=value`, over the config.
            reward: a reward function, or `{name: (function, weight)}`, in place of the config's
                parts.
            resume: the folder of a run to go on with.
            keep_alive_s: how long an idle session outlives its last client.

        Raises:
            ConfigError: names every key that is wrong.
        """
        found = None if resume is None else RunFolder.open(resume)
        if found is not None:
            _refuse_live(found)
            config = config or found.config_path
        if config is None:
            raise ConfigError("config: nothing was given; name a YAML file, or a run to resume")
        self.config: LabConfig = load_config(config, overrides)
        self._parts, self._functions = as_parts(reward)
        problems = start_problems(self.config, has_reward=reward is not None)
        problems += task_problems(self.config.task, is_deep=False)
        if problems:
            raise ConfigError("the session cannot start:\n" + "\n".join(f"  {p}" for p in problems))
        self._own = dumps(self.config)
        if keep_alive_s is None:
            keep_alive_s = self.config.keep_alive_s
        self._keep_alive_s = KEEP_ALIVE_S[frontend()] if keep_alive_s is None else keep_alive_s
        if found is None:
            self.config = with_pinned_models(self.config)
        self.folder = found or RunFolder.create(
            self.config.runs_dir, self.config.name, _stem(self.config)
        )
        self._is_closed = self._is_detached = False
        self._client: Future[Client] = Future()
        threading.Thread(
            target=self._launch, args=(found is not None,), name="session start", daemon=True
        ).start()

    @classmethod
    def attached(cls, info: runtime.SessionInfo) -> Self:
        """A session object for one that already runs."""
        session = cls.__new__(cls)
        session._client = Future()
        session._client.set_result(Client(info, owner()))
        session.folder = RunFolder.open(info.run_folder)
        session.config = load_config(session.folder.config_path)
        session._parts, session._functions, session._own = None, {}, {}
        session._keep_alive_s = 0.0
        session._is_closed = session._is_detached = False
        return session

    # --- life

    @property
    def name(self) -> str:
        """The run folder's name."""
        return self.folder.path.name

    def start(self, timeout_s: float = 600.0) -> Self:
        """Waits until every process is ready; raises what kept one from starting."""
        try:
            self.call("ready", timeout_s=timeout_s)
        except DeadlineError:
            raise  # it may still come up
        except LabError:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Ends all processes and frees their memory; what was recorded stays. Safe to call
        again."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            client = self._client.result()
        except LabError:
            return
        with contextlib.suppress(DeadlineError, WorkerError):  # gone or stuck: the next line sees
            client.call("close", timeout_s=5.0)
        if not client.wait_gone(CLOSE_S):
            os.kill(client.info.pid, 9)  # its fork server buries the rest
            client.wait_gone(CLOSE_S)
        client.close()

    def detach(self) -> None:
        """Lets the session go on without this client; `attach` finds it again."""
        self._is_closed = self._is_detached = True
        self._client.result().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- training

    def train(self, steps: int | None = None) -> Run:
        """Trains in the background, for `steps` more steps or to the config's end; returns at
        once."""
        number: Future[int] = Future()

        def begin() -> None:
            try:
                number.set_result(self.call("train", steps))
            except Exception as error:  # carried to whoever waits for the run
                number.set_exception(error)

        threading.Thread(target=begin, name="train", daemon=True).start()
        return Run(self, number)

    def evaluate(self) -> dict[str, float]:
        """Metrics of the policy on the held-out prompts; while a run is under way, at its next
        boundary."""
        return dict(self.call("evaluate"))

    def set(self, key: str, value: Any = None, /, **more: Any) -> int:
        """Changes a live knob (`s.set("rollout.rollout_batch_size", 48)`); returns the first step
        that has it.

        Raises:
            ConfigError: the key may not change while a run is under way, or the value does not fit.
        """
        return self.set_many({key: value, **more})

    def set_many(self, changes: Mapping[str, Any]) -> int:
        """Changes several knobs that only fit together, at one boundary."""
        return int(self.call("set", dict(changes), functions_named(changes), timeout_s=60.0))

    def set_reward(self, reward: RewardParts) -> None:
        """Scores with another function, or `{name: (function, weight)}`, from the next step on."""
        parts, functions = as_parts(reward)
        self.call("set_rewards", parts, functions)

    def snapshot(self, name: str | None = None) -> str:
        """Saves all that `rewind` needs; returns its name."""
        return str(self.call("snapshot", name))

    def rewind(self, to: str | int) -> int:
        """Goes back to a snapshot or to a step that has a checkpoint; returns that step."""
        return int(self.call("rewind", to))

    def export(self, to: str | Path, *, dtype: str | None = None, merge: bool = True) -> Path:
        """Writes the model as of now as a folder that transformers loads, low-rank adapters merged
        or, as peft has them, apart; returns the folder."""
        from verl_lab.models.export import export

        if not self._is_closed:
            self.call("save")
        return export(self.folder.path, to, dtype=dtype, merge=merge)

    # --- a step by hand

    def prompts(self, n: int | None = None) -> Batch:
        """Draws the next prompts, one step's worth by default; samples where they come with the
        data."""
        return self._batch("prompts", n)

    def rollout(self, prompts: Batch | None = None) -> Batch:
        """Samples a group of responses per prompt."""
        return self._stage("rollout", self.prompts() if prompts is None else prompts)

    def score(self, batch: Batch) -> Batch:
        """Adds `reward` and a column a part."""
        return self._stage("score", batch)

    def resample(self, batch: Batch) -> Batch:
        """Replaces groups whose rewards are all equal by groups of other prompts."""
        return self._stage("resample", batch)

    def greedy_rewards(self, batch: Batch) -> Batch:
        """Adds `greedy_reward`, of the likeliest response to the same prompt."""
        return self._stage("greedy_rewards", batch)

    def reference_logprobs(self, batch: Batch) -> Batch:
        """Adds `ref_logprobs`, for a KL term or preferences."""
        return self._stage("reference_logprobs", batch)

    def values(self, batch: Batch) -> Batch:
        """Adds `values`, of the critic."""
        return self._stage("values", batch)

    def advantages(self, batch: Batch) -> Batch:
        """Adds `advantages`, and `returns` where there is a critic."""
        return self._stage("advantages", batch)

    def pairs(self, batch: Batch) -> Batch:
        """The best and the worst sample of each group whose rewards differ."""
        return self._stage("pairs", batch)

    def update(self, batch: Batch) -> Batch:
        """Trains on the batch; where nothing is sampled it ends the step."""
        return self._stage("update", batch)

    def sync_weights(self) -> int:
        """Brings the rollout workers to the new weights, and ends the step; returns their
        version."""
        return int(self.call("sync_weights"))

    # --- looking

    def status(self) -> dict[str, Any]:
        """Where the session stands, as plain data.

        `state` is `starting`, `idle`, `training`, `paused`, `stopping`, `failed` or `closed`;
        `step` of `steps_total`; the `stage` under way with `stage_done` of `stage_total`; `last`
        holds the newest metrics, `eta_s` the seconds left, `workers` who runs where, `runs` each
        run's outcome, `num_clients` who is attached and `lease_ends_in_s` when it leaves without
        one.
        """
        if self._is_closed:
            return {
                "state": "detached" if self._is_detached else "closed",
                "step": self._reader_step(),
                "runs": [],
                "workers": [],
            }
        if not self._client.done():
            return {"state": "starting", "step": 0, "runs": [], "workers": []}
        return dict(self.call("status", timeout_s=30.0))

    @property
    def metrics(self) -> pd.DataFrame:
        """A row a step, a column a metric; read from the run folder."""
        with Reader(self.folder) as reader:
            return reader.metrics()

    def utilisation(self, first: int = 1, last: int | None = None) -> pd.DataFrame:
        """How much of the time each worker was busy over some steps; a row a worker."""
        with Reader(self.folder) as reader:
            return utilisation(reader.spans(), first, last)

    def samples(self, step: int) -> Batch:
        """The samples that a step trained on."""
        with Reader(self.folder) as reader:
            return SampleStore(self.folder).read(step, reader.visible_attempt(step))

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Asks the controller; waits for the session to start first."""
        if self._is_detached:
            raise StateError(
                f"session {self.name}: was detached; join it again with attach({self.name!r})"
            )
        if self._is_closed:
            raise StateError(
                f"session {self.name}: is closed; go on with "
                f"Session(resume={str(self.folder.path)!r})"
            )
        return self._started().call(method, *args, timeout_s=timeout_s, **kwargs)

    def _stage(self, name: str, batch: Batch) -> Batch:
        return self._batch("stage", name, batch)

    def _batch(self, method: str, *args: Any) -> Batch:
        batch = self.call(method, *args)
        assert isinstance(batch, Batch)
        return batch

    def _started(self) -> Client:
        while True:
            try:
                return self._client.result(timeout=0.1)  # in slices, so that an interrupt ends it
            except TimeoutError:
                if self._client.done():
                    raise

    def _launch(self, is_resume: bool) -> None:
        name = owner()
        try:
            found = resolve_devices(self.config)
            launch.replace_abandoned(name, {str(d) for devices in found.values() for d in devices})
            self._client.set_result(
                launch.start_controller(
                    self.config,
                    self.folder,
                    parts=self._parts,
                    functions=self._functions,
                    own=self._own,
                    is_resume=is_resume,
                    keep_alive_s=self._keep_alive_s,
                    owner=name,
                )
            )
        except Exception as error:  # carried to the first call that needs the session
            self._client.set_exception(error)

    def _reader_step(self) -> int:
        with Reader(self.folder) as reader:
            return int(reader.latest()[0])

    def _status_or_gone(self) -> dict[str, Any]:
        try:
            return self.status()
        except LabError as error:
            return {"state": "gone", "step": self._reader_step(), "note": str(error).split("\n")[0]}

    def __repr__(self) -> str:
        return f"Session({self.name!r}, {self._status_or_gone()['state']})"

    def _repr_html_(self) -> str:
        return session_html(self.name, self.config, self._status_or_gone())


def _stem(config: LabConfig) -> str:
    model = Path(config.model.name_or_path).stem.lower().replace(" ", "-")
    return f"{model}-{config.task.name}" if config.task else model


def _refuse_live(found: RunFolder) -> None:
    for info in runtime.sessions():
        if Path(info.run_folder) == found.path.absolute():
            raise StateError(
                f"{found.path}: a session works on it (pid {info.pid}); "
                f"attach to it, or end it with `verl-lab stop {found.path.name}`"
            )
