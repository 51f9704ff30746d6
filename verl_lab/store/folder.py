"""The run folder: where one experiment lies on disk."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_lab.errors import ConfigError, DataError

PACKAGES = ("verl-lab", "torch", "transformers", "accelerate", "safetensors", "pyarrow", "numpy")


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run. Making an object touches nothing on disk."""

    path: Path

    @property
    def config_path(self) -> Path:
        """The resolved settings as they are now; what changed on the way is in the database."""
        return self.path / "config.yaml"

    @property
    def environment_path(self) -> Path:
        """Versions, devices, commit."""
        return self.path / "environment.json"

    @property
    def database(self) -> Path:
        """Metrics, events, interventions, spans, workers."""
        return self.path / "run.db"

    @property
    def samples(self) -> Path:
        """Parquet files: every sample trained on."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints and snapshots, a folder each."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """One file a process."""
        return self.path / "logs"

    @classmethod
    def create(cls, runs_dir: str | Path, name: str | None, default_stem: str) -> RunFolder:
        """Claims a new folder: `name`, or `default_stem-<number>`; the next free number where it
        is taken.

        Raises:
            ConfigError: `name` is no name for a folder, or `runs_dir` cannot hold one.
        """
        if name is not None and (not name.strip(".") or "/" in name or "\0" in name):
            raise ConfigError(
                f"name: {name!r} cannot be a folder's; leave out '/' or choose another"
            )
        try:
            return cls._claim(Path(runs_dir), name, default_stem)
        except OSError as error:
            raise ConfigError(
                f"runs_dir: {runs_dir} cannot hold a new run ({error.strerror}: {error.filename}); "
                "choose another folder"
            ) from error

    @classmethod
    def _claim(cls, root: Path, name: str | None, default_stem: str) -> RunFolder:
        root.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            free = f"{name or default_stem}-{number}" if name is None or number > 1 else name
            try:
                (root / free).mkdir(mode=0o700)
            except FileExistsError:
                number += 1
                continue
            folder = cls(root / free)
            for part in (folder.samples, folder.checkpoints, folder.logs):
                part.mkdir()
            return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run's folder.

        Raises:
            DataError: there is no run at `path`.
        """
        folder = cls(Path(path))
        if folder.exists():
            return folder
        parent = folder.path.parent
        names = [other.path.name for other in list_runs(parent)]
        close = difflib.get_close_matches(folder.path.name, names, n=3, cutoff=0.4) or names[-3:]
        hint = (
            f"; near it are {', '.join(close)}"
            if close
            else "; `verl-lab runs` lists those that are"
        )
        raise DataError(f"{path}: is no run folder{hint}")

    def exists(self) -> bool:
        """Whether there is a run."""
        return any(map(os.path.exists, (self.config_path, self.database)))

    def write_config(self, text: str) -> None:
        """Replaces the settings; readers see the old or the new ones, never half."""
        _replace(self.config_path, text)

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Replaces what is known of the surroundings."""
        _replace(self.environment_path, json.dumps(environment, indent=2))


def list_runs(runs_dir: str | Path) -> list[RunFolder]:
    """The runs in a folder that can be read, the one last changed at the end."""
    root = Path(runs_dir)
    if not root.is_dir():
        return []
    found = [RunFolder(path) for path in root.iterdir() if RunFolder(path).exists()]
    return sorted(found, key=lambda run: (_changed(run), run.path.name))


def _changed(run: RunFolder) -> float:
    """When settings or records last changed, in seconds since the epoch.

    The folder's own time will not do: a reader changes it, by the lock file of the database.
    """
    times = [0.0]
    for path in (run.config_path, run.database):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)


def environment() -> dict[str, Any]:
    """Versions, machine and commit, as far as they are known without importing anything large."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "num_cores": len(os.sched_getaffinity(0)),
        "commit": _commit(),
        "command": sys.argv,
    }


def _commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.replace(path)
