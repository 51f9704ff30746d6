"""The weights between trainer and rollout: published once, loaded when the rollout is ready."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from verl_lab.controller.groups import RolloutGroup, Spans
from verl_lab.engines.weights import remove_version
from verl_lab.errors import StateError


class PublishedWeights:
    """The newest version of the weights, in shared memory.

    At most two versions are there at a time: the newest, and the one that is loaded.

    Args:
        memory: the folder that versions are written to.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._num_published = 0
        self._newest: dict[str, Any] = {}
        self._loaded: Path | None = None
        self._loading: Path | None = None

    async def publish(
        self, version: int, train: Callable[..., Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """Lets the trainer write a version; returns its `version`, `bytes` and `hash`."""
        self._num_published += 1  # a rewind publishes a version again
        folder = self._memory / f"weights-{version}-{self._num_published}"
        found = await train("publish", folder, version)
        before = self._newest.get("folder")
        if before not in (None, self._loaded, self._loading):
            remove_version(before)  # nobody ever loaded it
        self._newest = {**found, "folder": folder}
        return found

    async def load(self, rollout: RolloutGroup, span: Spans) -> None:
        """Brings the rollout workers to the newest version, and compares what they hold.

        Raises:
            StateError: a rollout worker holds other weights than the trainer published.
        """
        newest = self._newest
        if newest["folder"] == self._loaded:
            return
        self._loading = newest["folder"]
        loaded = await rollout.load_weights(newest["folder"], span)
        for name, held in zip(rollout.names, loaded, strict=True):
            if (held["hash"], held["version"]) != (newest["hash"], newest["version"]):
                raise StateError(
                    f"{name}: holds weights {held['version']} with hash {held['hash']} after a "
                    f"sync, the trainer published {newest['version']} with hash "
                    f"{newest['hash']}; stop and report this"
                )
        if self._loaded is not None:
            remove_version(self._loaded)
        self._loaded, self._loading = newest["folder"], None
