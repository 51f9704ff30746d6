"""The run folder: where one experiment lies on disk."""

from __future__ import annotations

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

from verl_lab.errors import DataError

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
        is taken."""
        root = Path(runs_dir)
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
        return self.config_path.exists() or self.database.exists()

    def write_config(self, text: str) -> None:
        """Replaces the settings; readers see the old or the new ones, never half."""
        _replace(self.config_path, text)

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Replaces what is known of the surroundings."""
        _replace(self.environment_path, json.dumps(environment, indent=2))


def list_runs(runs_dir: str | Path) -> list[RunFolder]:
    """The runs in a folder, oldest first."""
    root = Path(runs_dir)
    if not root.is_dir():
        return []
    found = [RunFolder(path) for path in root.iterdir() if RunFolder(path).exists()]
    return sorted(found, key=lambda run: run.path.stat().st_ctime)


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
