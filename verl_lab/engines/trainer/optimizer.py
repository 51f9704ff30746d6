"""AdamW over a model's parameters, its learning rate by the update, and its state in
safetensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from verl_lab.engines.trainer.base import UpdateSettings


class Optimizer:
    """AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) with warm-up and decay.

    Args:
        model: its float32 parameters are the master weights.
        betas: decay of the gradient's mean and square.
        offload: keep the state in host memory between updates.
    """

    def __init__(self, model: nn.Module, betas: tuple[float, float], *, offload: bool) -> None:
        self._names: dict[Tensor, str] = {
            p: n for n, p in model.named_parameters() if p.requires_grad
        }
        matrices = [p for p in self._names if p.ndim > 1]
        others = [p for p in self._names if p.ndim <= 1]  # norms and biases: never decayed
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)
        self._offload = offload
        self.num_updates = 0

    def zero_grad(self) -> None:
        """Forgets gradients, those of an update that failed half-way included."""
        self._adam.zero_grad(set_to_none=True)

    def step(self, settings: UpdateSettings, peak: float | None = None) -> dict[str, float]:
        """Clips the gradient and makes one update; a gradient that is not finite makes none.

        Args:
            settings: the numbers.
            peak: learning rate in place of that of the settings.

        Returns:
            `grad_norm` before clipping, `learning_rate`, `skipped_updates`.
        """
        norm = nn.utils.clip_grad_norm_(list(self._names), settings.max_grad_norm)
        rate = learning_rate(self.num_updates, settings, peak)
        is_finite = bool(norm.isfinite())
        if is_finite:
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.param_groups[0]["weight_decay"] = settings.weight_decay
            self._move_state(None)
            self._adam.step()
            if self._offload:
                self._move_state(torch.device("cpu"))
        self.zero_grad()
        self.num_updates += 1
        return {"grad_norm": float(norm), "learning_rate": rate, "skipped_updates": 1.0 - is_finite}

    def tensors(self) -> dict[str, Tensor]:
        """The state by `<name of the state>/<name of the parameter>`."""
        return {
            f"{key}/{self._names[parameter]}": tensor.contiguous()
            for parameter, state in self._adam.state.items()
            for key, tensor in state.items()
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Goes back to what `tensors` gave; empty is the state before the first update."""
        parameters = {name: parameter for parameter, name in self._names.items()}
        self._adam.state.clear()
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            parameter = parameters[name]
            device = torch.device("cpu") if self._offload else parameter.device
            # Adam's step count stays where it was made; the moments go with their parameter.
            self._adam.state[parameter][kind] = tensor.clone().to(device)

    def _move_state(self, device: torch.device | None) -> None:
        for parameter, state in self._adam.state.items():
            for key, tensor in state.items():
                state[key] = tensor.to(device or parameter.device)


def learning_rate(update: int, settings: UpdateSettings, peak: float | None = None) -> float:
    """The learning rate of an update, counted from 0.

    It rises linearly over the warm-up, so that the first update has 1/warmup of the peak, and then
    decays to 0 at `total_updates`: not at all, linearly, or as half a cosine.
    """
    peak = settings.learning_rate if peak is None else peak
    warmup = settings.warmup_updates
    if update < warmup:
        return peak * (update + 1) / warmup
    span = max(settings.total_updates - warmup, 1)
    progress = min((update - warmup) / span, 1.0)
    if settings.lr_schedule == "linear":
        return peak * (1 - progress)
    if settings.lr_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak
