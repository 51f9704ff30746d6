"""A causal language model as the native engine calls it: whole prompts, then one token a row.

Letters: `n` rows, `V` vocabulary.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from verl_lab.engines.rollout.cache import PromptCache, SlotCache
from verl_lab.errors import ConfigError, DataError

LENGTH_STEP = 16
"""Lengths are rounded up to a multiple of this many tokens, see `ROW_STEP`."""
ROW_STEP = {"cpu": 4}
"""Matrix products have a multiple of this many rows: in rows left over, the CPU's kernels add up in
another order. So, and with lengths in steps of `LENGTH_STEP`, a row's numbers do not depend on the
number of others. (With several threads this also needs `MKL_CBWR=AUTO,STRICT`.)"""
ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers whose state is keys and values alone."""


class Policy:
    """Runs forward passes of a transformers model.

    Raises:
        DataError: the model's layers or its forward pass are of a kind that is not supported.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        config: Any = model.config
        self.config: Any = config.get_text_config()
        if config._attn_implementation not in ("sdpa", "eager"):
            # Flash kernels take no mask, and rows of different lengths need one.
            model.set_attn_implementation("sdpa")  # type: ignore[operator]
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.row_step = ROW_STEP.get(self.device.type, 1)
        self.vocab_size: int = self.config.vocab_size
        self.max_length: int | None = getattr(self.config, "max_position_embeddings", None)
        self._window: int | None = getattr(self.config, "sliding_window", None)
        self._kinds = self._layer_kinds()
        self._cache_name = self._check_forward()

    def prefill(self, prompts: list[list[int]]) -> tuple[PromptCache, Tensor]:
        """One forward pass over whole prompts, padded on the right.

        Returns:
            Their keys and values, and the logits [n, V] after each prompt's last token.
        """
        width = rounded(max(map(len, prompts)))
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in prompts])
        last = torch.tensor([len(ids) - 1 for ids in prompts])
        # Asking for a position several times rounds up the rows of the last matrix product.
        copies = self.row_step // math.gcd(self.row_step, len(prompts))
        cache = PromptCache()
        logits = self._forward(
            cache,
            input_ids=ids.to(self.device),
            position_ids=torch.arange(width, device=self.device).expand(len(prompts), -1),
            logits_to_keep=last[:, None].expand(-1, copies).contiguous().to(self.device),
        )
        return cache, logits[:, 0].float()

    def decode(self, cache: SlotCache, ids: list[int], positions: list[int]) -> Tensor:
        """One forward pass of one token a row, over the first rows of the cache.

        Args:
            cache: holds the tokens before.
            ids: [n] tokens.
            positions: [n] where each stands in its sequence.

        Returns:
            Logits [n, V] after these tokens.
        """
        n = len(ids)
        spare = [0] * (rounded(n, self.row_step) - n)
        packed = torch.tensor([ids + spare, positions + spare]).to(self.device)
        length = rounded(max(positions) + 1)
        cache.make_room(length)
        cache.aim(packed[1], length)
        logits = self._forward(
            cache,
            input_ids=packed[0, :, None],
            position_ids=packed[1, :, None],
            attention_mask=self._mask(packed[1], length),
            logits_to_keep=1,
        )
        return logits[:n, -1].float()

    def _forward(self, cache: PromptCache | SlotCache, **inputs: Any) -> Tensor:
        output = self.model(**inputs, **{self._cache_name: cache}, use_cache=True)
        logits: Tensor = output.logits
        return logits

    def _mask(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [n, 1, 1, length] by kind of layer, or the mask if there is one kind."""
        columns = torch.arange(length, device=self.device)
        seen = columns <= positions[:, None]
        visible = {"full_attention": seen}
        if self._window is not None:
            visible["sliding_attention"] = seen & (columns > positions[:, None] - self._window)
        lowest = torch.finfo(self.dtype).min
        masks = {
            kind: torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(
                ~visible[kind], lowest
            )[:, None, None]
            for kind in self._kinds
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _layer_kinds(self) -> list[str]:
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if not kinds:
            kinds = {"full_attention" if self._window is None else "sliding_attention"}
        if kinds - ATTENTION:
            raise DataError(
                f"model.name_or_path: {type(self.model).__name__} has layers of kind "
                f"{sorted(kinds - ATTENTION)}, whose state is not keys and values; use a model "
                f"with attention layers only"
            )
        return sorted(kinds)

    def _check_forward(self) -> str:
        parameters = inspect.signature(self.model.forward).parameters
        missing = {"position_ids", "logits_to_keep"} - set(parameters)
        caches = [p for p in ("cache", "past_key_values") if p in parameters]
        if missing or not caches:
            raise DataError(
                f"model.name_or_path: the forward pass of {type(self.model).__name__} takes no "
                f"{', '.join(sorted(missing)) or 'cache'}; use a decoder such as Llama or Qwen"
            )
        return caches[0]

    def check_length(self, longest_prompt: int, max_new_tokens: int) -> None:
        """Raises a ConfigError where a sequence could become longer than the model allows."""
        if self.max_length is not None and longest_prompt + max_new_tokens > self.max_length:
            raise ConfigError(
                f"rollout.max_new_tokens: a prompt of {longest_prompt} tokens and {max_new_tokens} "
                f"new ones are more than the model's {self.max_length} positions; lower it, or "
                f"data.max_prompt_tokens"
            )


def rounded(number: int, step: int = LENGTH_STEP) -> int:
    """The next multiple of `step`; by default, the length of tensors that hold so many tokens."""
    return -(-number // step) * step
