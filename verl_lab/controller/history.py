"""The record of a run: what is written as it goes, and the checkpoints it can go back to.

A checkpoint is a folder `checkpoints/step-000010`, a snapshot `checkpoints/<name>`: the trainer's
state, the step, the place in the data. It is complete or not there at all.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from verl_lab.batch.columns import Batch
from verl_lab.errors import DataError, StateError
from verl_lab.runtime.launch.local import describe_exit
from verl_lab.runtime.peer import Peer
from verl_lab.store.checkpoint import problems, seal
from verl_lab.store.database import Reader, Recorder
from verl_lab.store.folder import RunFolder, environment
from verl_lab.store.samples import SampleStore

STATE = "state.json"
STEP = re.compile(r"step-(\d+)")


class History:
    """Writes everything down; the only writer of a run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.last: dict[str, float] = {}
        """The newest value of each metric."""
        self._evaluated: set[int] = set()
        self._recorder: Recorder

    def open(self) -> None:
        """Opens the database, and takes up what an earlier session recorded."""
        self._recorder = Recorder(self.folder)
        self._samples = SampleStore(self.folder)
        for draft in self.folder.checkpoints.glob(".*"):
            shutil.rmtree(draft)

    def describe(self, **more: Any) -> None:
        """Writes down versions, machine and commit, and what else is known of the surroundings."""
        self.folder.write_environment({**environment(), **more})

    def close(self) -> None:
        """Closes the database."""
        if hasattr(self, "_recorder"):
            self._recorder.close()

    # --- writing down

    def begin(self, step: int, reason: str) -> None:
        """Begins a new attempt from a step; what was recorded beyond it is hidden."""
        self._recorder.begin_attempt(step, reason)
        self._recorder.event("begin", reason, step)
        with Reader(self.folder) as reader:
            self._evaluated = set(reader.evaluations())

    def record(self, step: int, metrics: Mapping[str, float], batch: Batch | None = None) -> None:
        """Records metrics of a step, and its samples if it has any; the metrics say that it is
        done."""
        if batch is not None:
            self._samples.write(step, self._recorder.attempt, batch)
        self._recorder.step(step, metrics)
        self.last = {**self.last, **metrics}
        if any(name.startswith("eval/") for name in metrics):
            self._evaluated.add(step)

    def has_evaluation(self, step: int) -> bool:
        """Whether the step's policy has been evaluated."""
        return step in self._evaluated

    def event(self, kind: str, text: str, step: int) -> None:
        """Records that something happened."""
        self._recorder.event(kind, text, step)

    def intervention(self, step: int, key: str, old: Any, new: Any) -> None:
        """Records that a knob was changed, from `step` on."""
        self._recorder.intervention(step, key, old, new)

    def span(
        self, worker: str, device: str, kind: str, step: int, start: float, end: float
    ) -> None:
        """Notes what a worker did when."""
        self._recorder.span(worker, device, kind, step, start, end)

    def worker(self, event: str, peer: Peer, step: int) -> None:
        """Records the start or the end of a worker."""
        role = peer.name.rpartition("-")[0]
        if event == "started":
            self._recorder.worker_started(peer.name, role, peer.device, peer.pid or 0)
            return
        self._recorder.worker_ended(peer.name, peer.pid or 0, peer.exit_status)
        if not peer.is_stopping:
            how = describe_exit(peer.exit_status or 0)
            self._recorder.event("worker_died", f"{peer.name}: died with {how}", step)

    # --- checkpoints

    async def save(
        self,
        name: str | None,
        state: dict[str, Any],
        save_trainer: Callable[[Path], Awaitable[None]],
        *,
        keep: int,
    ) -> Path:
        """Writes a checkpoint, or a snapshot of that name, and removes checkpoints beyond the
        newest `keep`."""
        final = self.folder.checkpoints / (name or f"step-{state['step']:06d}")
        draft = final.with_name(f".{final.name}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        await save_trainer(draft / "trainer")
        attempt = self._recorder.attempt
        (draft / STATE).write_text(json.dumps({**state, "attempt": attempt}))
        if final.exists():  # of an attempt that was rewound
            shutil.rmtree(final)
        await asyncio.to_thread(seal, draft, final)  # hashing gigabytes takes seconds
        for old in self._by_step()[:-keep]:
            shutil.rmtree(old)
        self._recorder.event("snapshot" if name else "checkpoint", final.name, state["step"])
        return final

    def newest(self) -> Path | None:
        """The newest whole checkpoint or snapshot of what is visible; None is the start of the
        run."""
        with Reader(self.folder) as reader:
            attempts = reader.attempts()
        visible = []
        for folder in self.folder.checkpoints.glob("[!.]*"):
            if not (folder / STATE).exists():
                continue
            state = json.loads((folder / STATE).read_text())
            later = attempts[attempts["attempt"] > state["attempt"]]
            if (later["from_step"] >= state["step"]).all():
                visible.append((state["step"], state["attempt"], folder))
        for step, _, folder in sorted(visible, reverse=True):
            found = problems(folder)
            if not found:
                return folder
            self.event("damaged", f"{folder.name}: {'; '.join(found)}", step)
        return None

    def has_checkpoint(self, step: int) -> bool:
        """Whether the policy as it is after `step` has been saved."""
        state = self.folder.checkpoints / f"step-{step:06d}" / STATE
        return state.exists() and json.loads(state.read_text())["attempt"] == self._recorder.attempt

    def load_state(self, folder: Path) -> dict[str, Any]:
        """What the controller keeps in a checkpoint.

        Raises:
            DataError: a file of it is missing or damaged.
        """
        found = problems(folder)
        if found:
            raise DataError(f"{folder}: is damaged ({'; '.join(found)}); choose another checkpoint")
        return json.loads((folder / STATE).read_text())  # type: ignore[no-any-return]

    def find(self, to: str | int) -> Path:
        """The checkpoint of a step, or a snapshot by name.

        Raises:
            StateError: there is none; says which there are.
        """
        name = f"step-{to:06d}" if isinstance(to, int) else to
        folder = self.folder.checkpoints / name
        if not folder.is_dir() or name.startswith("."):
            known = sorted(path.name for path in self.folder.checkpoints.glob("[!.]*"))
            raise StateError(f"rewind: there is no {name}; there are {', '.join(known) or 'none'}")
        return folder

    def snapshot_name(self, name: str | None) -> str:
        """A name that a snapshot may have, made up if none is given.

        Raises:
            StateError: it is taken, or no name for a folder.
        """
        taken = {path.name for path in self.folder.checkpoints.iterdir()}
        if name is None:
            return next(n for n in (f"snapshot-{i}" for i in range(1, 10**6)) if n not in taken)
        if not re.fullmatch(r"\w[\w.-]*", name) or STEP.fullmatch(name):
            raise StateError(
                f"snapshot: {name!r} cannot be its name; use letters, digits, '_', '-' and '.'"
            )
        if name in taken:
            raise StateError(f"snapshot: there is one named {name} already; choose another name")
        return name

    def _by_step(self) -> list[Path]:
        return sorted(p for p in self.folder.checkpoints.iterdir() if STEP.fullmatch(p.name))
