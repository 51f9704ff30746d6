"""Checkpoints on disk: folders that are whole or not there.

Everything in one is safetensors or JSON; nothing is unpickled. `manifest.json`, written last, has
each file's size and SHA-256; then the folder gets its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def seal(draft: Path, final: Path) -> None:
    """Makes a folder of finished files a checkpoint: manifest, everything on disk, then its
    name."""
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    manifest = {
        str(path.relative_to(draft)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*files, draft / MANIFEST, *(p for p in draft.rglob("*") if p.is_dir()), draft):
        _to_disk(path)
    draft.rename(final)
    _to_disk(final.parent)


def problems(folder: Path) -> list[str]:
    """What is missing or damaged in a checkpoint; empty for a whole one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return [text for name, entry in manifest.items() for text in _problem(folder, name, entry)]
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return [f"{MANIFEST} is missing or damaged"]


def _problem(folder: Path, name: str, entry: dict[str, Any]) -> Iterator[str]:
    path, size, digest = folder / name, entry["bytes"], entry["sha256"]
    if not path.is_file():
        yield f"{name} is missing"
    elif path.stat().st_size != size:
        yield f"{name} has {path.stat().st_size} bytes of {size}"
    elif _sha256(path) != digest:
        yield f"{name} is damaged"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
