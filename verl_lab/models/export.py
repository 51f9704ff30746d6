"""Models that this lab trained, as folders that transformers and peft load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from verl_lab.config.load import load_config
from verl_lab.config.schema import LabConfig
from verl_lab.config.sources import checkpoint_of, find
from verl_lab.errors import ConfigError, DataError
from verl_lab.models.load import load_policy, load_tokenizer, plain_config
from verl_lab.models.lora import CONFIG as ADAPTER_CONFIG
from verl_lab.models.lora import WEIGHTS as ADAPTER_WEIGHTS
from verl_lab.store.checkpoint import problems

WEIGHTS = "model.safetensors"
MARK = "verl_lab.json"
"""Lies beside a model that reads the very token ids of prompt and response."""


def write_model_files(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Writes all that `from_pretrained` needs beside the weights: config, generation config,
    tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = plain_config(model.config)
    settings.architectures = [type(model).__name__]
    settings.dtype = "float32"
    settings.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if "SequenceClassification" in type(model).__name__:
        (folder / MARK).write_text(json.dumps({"reads": "ids"}))


def export(
    run: str | Path,
    to: str | Path,
    *,
    dtype: str | None = None,
    merge: bool = True,
    overwrite: bool = False,
) -> Path:
    """Writes the model of a run as a folder that transformers loads.

    Args:
        run: a run folder, for its newest checkpoint, or `<run>@<checkpoint>`.
        to: the folder to write.
        dtype: of the weights; `model.torch_dtype` of the run by default.
        merge: add low-rank adapters to the weights; else the adapters alone are written, as peft
            loads them.
        overwrite: write into a folder that is not empty.

    Raises:
        ConfigError: `to` cannot be written to, or there is no adapter to keep apart.
        DataError: there is no such run or checkpoint, or it is damaged.
    """
    checkpoint, target = checkpoint_of(str(run)), Path(to)
    trained = checkpoint / "trainer"
    config = load_config(checkpoint.parent.parent / "config.yaml")
    precision = _dtype(dtype or config.model.torch_dtype)
    has_adapter = (trained / ADAPTER_CONFIG).exists()
    if not merge and not has_adapter:
        raise ConfigError(f"--no-merge: {run} was trained without adapters; leave it out")
    if target.is_file() or (target.is_dir() and any(target.iterdir()) and not overwrite):
        what = "is a file" if target.is_file() else "is not empty"
        raise ConfigError(f"--to: {target} {what}; choose another folder, or add --force")
    found = problems(checkpoint)
    if found:
        raise DataError(f"{checkpoint}: is damaged ({'; '.join(found)}); choose another checkpoint")
    target.mkdir(parents=True, exist_ok=True)
    for old in _weights(target):  # transformers would load them beside or before the new ones
        old.unlink()
    if not merge:
        _write_adapter(trained, target)
    elif has_adapter:
        _write_merged(config, trained, precision, target)
    else:
        _copy(trained, precision, target)
    return target


def _weights(folder: Path) -> list[Path]:
    """All that readers of a model folder take for its weights."""
    patterns = ("model*.safetensors*", "pytorch_model*.bin*", "adapter_*")
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _dtype(name: str) -> torch.dtype:
    known = ("float32", "bfloat16", "float16")
    if name not in known:
        raise ConfigError(f"--dtype: is {name!r}; use one of {', '.join(known)}")
    return getattr(torch, name)  # type: ignore[no-any-return]


def _write_adapter(trained: Path, to: Path) -> None:
    shutil.copy(trained / ADAPTER_WEIGHTS, to / ADAPTER_WEIGHTS)
    described = json.loads((trained / ADAPTER_CONFIG).read_text())
    base = find(described["base_model_name_or_path"])
    if base.adapters:
        raise ConfigError(
            f"--no-merge: the adapters lie on those of {base.adapters[-1]}, which peft cannot "
            f"stack; leave it out"
        )
    # peft does not know `package://`.
    described["base_model_name_or_path"] = str(Path(base.location, base.gguf_file or ""))
    (to / ADAPTER_CONFIG).write_text(json.dumps(described, indent=1))


def _write_merged(config: LabConfig, trained: Path, dtype: torch.dtype, to: Path) -> None:
    """Adds in float32, so that the sum is rounded once."""
    named = config.model.model_copy(update={"name_or_path": str(trained)})
    model: Any = load_policy(named, torch.device("cpu"), torch.float32)
    for parameter in model.parameters():  # `to` would round the buffers too
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(to)
    load_tokenizer(config.model).save_pretrained(to)


def _copy(trained: Path, dtype: torch.dtype, to: Path) -> None:
    own = {"learner.json", "optimizer.safetensors", "rng.safetensors", WEIGHTS}
    for path in trained.iterdir():
        if path.is_file() and path.name not in own:
            shutil.copy(path, to / path.name)
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(trained / WEIGHTS).items()
    }
    save_file(tensors, to / WEIGHTS, metadata={"format": "pt"})
    described = json.loads((to / "config.json").read_text())
    described["dtype"] = str(dtype).removeprefix("torch.")
    (to / "config.json").write_text(json.dumps(described, indent=2))
