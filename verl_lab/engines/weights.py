"""Published weights: versioned safetensors that the trainer writes and rollout workers map.

A version is a folder with `rank<r>.safetensors` and `index.json`, which appears last: it names
each tensor's file, shape, dtype and hash. A reader copies what it needs into its own tensors and
hashes what it then holds, in the precision in which it was published, so a byte that went astray
is an error and never a slightly different policy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from verl_lab.errors import StateError

INDEX = "index.json"
ROW = 1 << 16
"""Words hashed with one set of multipliers."""
ROWS_AT_ONCE = 8
"""Keeps what the hash touches at a time in the cache."""


def publish(
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    version: int,
    *,
    rank: int = 0,
    dtype: torch.dtype | None = None,
    is_partial: bool = False,
) -> dict[str, Any]:
    """Writes a version of the weights; returns its `version`, `bytes` and `hash`.

    Args:
        tensors: names and tensors, each once.
        folder: is made; must not hold a version yet.
        version: its number.
        rank: the writer's number among the trainer workers.
        dtype: what floating-point tensors are cast to; as they are by default.
        is_partial: the model has tensors that never change, and these are not among them.
    """
    folder.mkdir(mode=0o700, parents=True)
    held = {name: _cast(tensor, dtype) for name, tensor in tensors}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    _check_room(folder, num_bytes)
    file = f"rank{rank}.safetensors"
    save_file(held, folder / file)
    index: dict[str, Any] = {
        "version": version,
        "is_partial": is_partial,
        "tensors": {
            name: {
                "file": file,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "hash": tensor_hash(tensor),
            }
            for name, tensor in held.items()
        },
    }
    draft = folder / f".{INDEX}"
    draft.write_text(json.dumps(index))
    draft.rename(folder / INDEX)
    return {"version": version, "bytes": num_bytes, "hash": _combined(index["tensors"])}


@torch.no_grad()
def load_into(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Copies published weights into a model, in place; returns `version`, `bytes`, `tensors`,
    `hash`. What fails leaves weights of two versions.

    Raises:
        StateError: a tensor is missing, has another shape, or does not hold what was published.
    """
    index = json.loads((folder / INDEX).read_text())
    mine = dict(model.state_dict(keep_vars=True))
    published = index["tensors"]
    _check_names(mine, published, folder, is_partial=index["is_partial"])
    num_bytes, hashes = 0, {}
    for file in sorted({entry["file"] for entry in published.values()}):
        with safe_open(folder / file, framework="pt") as source:
            for name in source.keys():  # noqa: SIM118 - it is no dict
                mine[name].copy_(source.get_tensor(name))
    for name, entry in published.items():
        found = tensor_hash(mine[name].to(getattr(torch, entry["dtype"])))
        if found != entry["hash"]:
            raise StateError(
                f"weights {index['version']}: {name} has hash {found} after loading, "
                f"{entry['hash']} was published; the shared memory or the copy is damaged, so stop "
                f"the run"
            )
        hashes[name] = {"hash": found}
        num_bytes += mine[name].numel() * mine[name].element_size()
    return {
        "version": index["version"],
        "bytes": num_bytes,
        "tensors": len(published),
        "hash": _combined(hashes),
    }


def remove_version(folder: Path) -> None:
    """Frees a version's memory; readers that have mapped it keep what they have."""
    shutil.rmtree(folder, ignore_errors=True)


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers by name, tied ones once, under their first name."""
    seen: set[tuple[int, torch.Size]] = set()
    distinct = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in seen:
            seen.add(key)
            distinct[name] = tensor
    return distinct


@torch.no_grad()
def tensor_hash(tensor: Tensor) -> int:
    """A 64-bit hash of a tensor's bytes, the same on every device; one changed byte always changes
    it.

    Words of 4 bytes are multiplied by odd numbers that depend on their place, modulo 2^32, and
    added up in rows; the rows likewise, modulo 2^64. It guards against mistakes, not against an
    adversary.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.numel() % 4:
        data = torch.cat([data, data.new_zeros(4 - data.numel() % 4)])
    words = data.view(torch.int32)
    multipliers = _odd(ROW, data.device, torch.int32)
    sums = []
    for block in torch.split(words, ROW * ROWS_AT_ONCE):
        for row in torch.split(block, ROW) if block.numel() % ROW else [block.view(-1, ROW)]:
            product = row * multipliers[: row.shape[-1]]
            sums.append(product.sum(-1, dtype=torch.int64).flatten())
    if not sums:
        return 0
    rows = torch.cat(sums)
    total = (rows * _odd(len(rows), data.device, torch.int64)).sum()
    return int(total) & (2**64 - 1)


def _odd(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`count` odd numbers without a visible pattern, by wrap-around."""
    n = torch.arange(count, dtype=torch.int64, device=device)
    mixed = n * 0x9E3779B1 + 0x7F4A7C15
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    return (mixed | 1).to(dtype)


def _combined(tensors: dict[str, dict[str, Any]]) -> str:
    text = json.dumps([[name, tensors[name]["hash"]] for name in sorted(tensors)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.contiguous()


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise StateError(
            f"weights: {folder.parent} has room for {free / 2**20:,.0f} MiB, they need "
            f"{num_bytes / 2**20:,.0f}; enlarge the shared memory (docker: --shm-size), or set "
            f"VERL_LAB_MEMORY_DIR to a folder on a disk"
        )


def _check_names(
    mine: dict[str, Tensor], published: dict[str, Any], folder: Path, *, is_partial: bool
) -> None:
    for name, entry in published.items():
        if name not in mine or list(mine[name].shape) != entry["shape"]:
            shape = list(mine[name].shape) if name in mine else "no such tensor"
            raise StateError(
                f"{folder.name}: {name} has shape {entry['shape']}, the model has {shape}; "
                f"trainer and rollout must load the same model.name_or_path"
            )
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        if torch.promote_types(dtype, mine[name].dtype) != mine[name].dtype:
            raise StateError(
                f"{folder.name}: {name} is {dtype}, which {mine[name].dtype} of the model cannot "
                f"hold; trainer and rollout must have the same model.torch_dtype"
            )
    if is_partial:
        return
    held = {tensor.data_ptr() for name, tensor in mine.items() if name in published}
    lost = [name for name, tensor in mine.items() if tensor.data_ptr() not in held]
    if lost:
        raise StateError(f"{folder.name}: lacks {', '.join(lost[:3])}, which the model has")
