"""What crosses a process boundary: a msgpack header and raw buffers, never a pickle of an object.

A message is `[header, buffer…]`. A `Batch` anywhere in the header travels as an Arrow IPC buffer
of its own, or, where it is large and both sides share a folder, as the path of a file that the
reader maps and removes. Exceptions travel as their name, arguments and traceback: those of
`verl_lab.errors` are raised again as themselves, any other as a `WorkerError` that names the peer.
"""

from __future__ import annotations

import struct
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgpack

from verl_lab import errors
from verl_lab.batch.columns import Batch

Kind = Literal["call", "reply", "error", "report"]
SPILL_BYTES = 1 << 20
"""A batch larger than this goes by reference where a spill folder is given."""
_BUFFER, _FILE, _PATH = 1, 2, 3


@dataclass(frozen=True)
class Message:
    """One message of a conversation; answers carry the `id` of their call."""

    kind: Kind
    id: int
    body: Any


def encode(message: Message, spill: Path | None = None) -> list[Any]:
    """The frames of a message. Batches over `SPILL_BYTES` go to files in `spill`, if given."""
    buffers: list[Any] = []

    def default(value: Any) -> Any:
        if isinstance(value, Batch):
            if spill is not None and value.table.nbytes > SPILL_BYTES:
                path = spill / f"{uuid.uuid4().hex}.arrow"
                value.write_ipc(path)
                return msgpack.ExtType(_FILE, str(path).encode())
            buffers.append(value.to_ipc())
            return msgpack.ExtType(_BUFFER, struct.pack("<I", len(buffers)))
        if isinstance(value, Path):
            return msgpack.ExtType(_PATH, str(value).encode())
        if hasattr(value, "item"):  # numpy scalars
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot travel in a message: {value!r:.100}")

    header = msgpack.packb([message.kind, message.id, message.body], default=default)
    return [header, *buffers]


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """The message of these frames."""

    def ext(code: int, data: bytes) -> Any:
        if code == _BUFFER:
            return Batch.from_ipc(frames[struct.unpack("<I", data)[0]])
        if code == _PATH:
            return Path(data.decode())
        path = Path(data.decode())
        batch = Batch.open_ipc(path)
        path.unlink()  # the map keeps the memory until the batch is dropped
        return batch

    kind, number, body = msgpack.unpackb(frames[0], ext_hook=ext, strict_map_key=False)
    return Message(kind, number, body)


def describe_error(error: BaseException) -> dict[str, Any]:
    """What travels of an exception."""
    return {
        "type": type(error).__name__,
        "args": [a if isinstance(a, str | int | float | None) else str(a) for a in error.args],
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def rebuild_error(described: dict[str, Any], peer: str) -> errors.LabError:
    """The exception that a peer described, ready to raise here."""
    kind = getattr(errors, described["type"], None)
    if isinstance(kind, type) and issubclass(kind, errors.LabError):
        error = kind(*described["args"])
    else:
        error = errors.WorkerError(
            peer, f"raised {described['type']}: {described['text']}", described["traceback"]
        )
    error.remote_traceback = described["traceback"]
    return error
