"""Finding sessions and runs: those that live, and those on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_lab.errors import StateError
from verl_lab.runtime import folder as runtime
from verl_lab.session.launch import describe
from verl_lab.session.session import Session
from verl_lab.store.database import Reader
from verl_lab.store.folder import list_runs

if TYPE_CHECKING:
    import pandas as pd


def find(run: str | Path) -> runtime.SessionInfo:
    """The live session that works on a run, by folder, by name or by session id."""
    live = list(runtime.sessions())
    path = Path(run).absolute()
    for info in live:
        folder = Path(info.run_folder)
        if path == folder or str(run) in (folder.name, info.id):
            return info
    names = ", ".join(Path(info.run_folder).name for info in live) or "none"
    raise StateError(
        f"{run}: no live session works on it (live: {names}); "
        f"`verl-lab runs` lists those on disk, and Session(resume=...) or "
        f"`verl-lab train --resume` goes on from the last checkpoint of one"
    )


def attach(run: str | Path) -> Session:
    """Joins a session that another process, or this kernel before a restart, has started."""
    return Session.attached(find(run))


def ps() -> list[dict[str, Any]]:
    """The live sessions of this user: their state, what they hold, and when they end."""
    return [describe(info) for info in runtime.sessions()]


def runs(runs_dir: str | Path = "runs") -> pd.DataFrame:
    """The runs on disk, newest last: steps done, last reward and evaluation, and whether one is
    live."""
    import pandas as pd

    live = {info.run_folder for info in runtime.sessions()}
    rows = []
    for folder in list_runs(runs_dir):
        with Reader(folder) as reader:
            step, _ = reader.latest()
            metrics = reader.metrics()
        row: dict[str, Any] = {"run": folder.path.name, "steps": step}
        for name in ("reward/mean", "eval/accuracy", "eval/reward"):
            known = metrics[name].dropna() if name in metrics else metrics.iloc[:0]
            row[name] = known.to_numpy()[-1] if len(known) else float("nan")
        rows.append({**row, "is_live": str(folder.path.absolute()) in live})
    return pd.DataFrame(rows).set_index("run") if rows else pd.DataFrame()
