"""Reward models: Hugging Face sequence classifiers that score a response to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from verl_lab.config.sources import find
from verl_lab.errors import DataError
from verl_lab.models.export import MARK
from verl_lab.models.scorer import scorer_head

BATCH_SIZE = 16
Prompt = str | list[dict[str, Any]]


class RewardModel:
    """Scores texts with the first output of a sequence classifier.

    A tokenizer with a chat template sees a user's turn and an assistant's; another sees a pair of
    texts, as reward models such as OpenAssistant's were trained. Of several outputs the first is
    the score.

    Args:
        name_or_path: a Hugging Face id, a folder, or the run folder of a reward model.
        device: what torch calls the device.
    """

    def __init__(self, name_or_path: str, device: str) -> None:
        location = find(name_or_path).location
        self.reads_ids = (Path(location) / MARK).exists()
        """Whether it was trained here, on the very token ids of prompt and response."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(location)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                location, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"reward_model.name_or_path: {name_or_path} cannot be loaded; name a folder or an "
                f"id of a "
                f"sequence classifier with safetensors weights\n{error}"
            ) from error
        missing = sorted(set(info["missing_keys"]) & dict(model.named_parameters()).keys())
        if missing:  # transformers makes them up, and random scores look like scores
            raise DataError(
                f"reward_model.name_or_path: {name_or_path} has no {', '.join(missing)}; name a "
                f"model that was trained as a sequence classifier"
            )
        self._batch_size = BATCH_SIZE if self._agree_on_padding(model.config) else 1
        self._model = model.to(device).eval()
        self._device = device

    @property
    def weights_bytes(self) -> int:
        """Memory of its parameters."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def speaks_like(self, tokenizer: Any) -> bool:
        """Whether a tokenizer means the same by every id."""
        return bool(self._tokenizer.get_vocab() == tokenizer.get_vocab())

    @torch.inference_mode()
    def score_ids(self, rows: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
        """Scores of token ids, [B] float64: at the last token of each row, whatever it is.

        Args:
            rows: [B], prompt and response as the policy had them.
        """
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores = np.empty(len(rows))
        head = scorer_head(self._model)
        for start in range(0, len(order), BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            width = len(rows[chosen[-1]])
            ids = torch.tensor([[*rows[i], *[0] * (width - len(rows[i]))] for i in chosen])
            lengths = torch.tensor([len(rows[i]) for i in chosen])
            mask = torch.arange(width)[None] < lengths[:, None]
            states = self._model.base_model(
                input_ids=ids.to(self._device), attention_mask=mask.long().to(self._device)
            ).last_hidden_state
            last = states[torch.arange(len(chosen)), lengths - 1]
            scores[chosen] = head(last)[:, 0].double().cpu().numpy()
        return scores

    def _agree_on_padding(self, config: Any) -> bool:
        """Makes the tokenizer pad with what the model takes for padding; False if nothing is.

        A causal classifier scores at the last token that is not its padding, so that with another
        one it would score the padding.
        """
        tokenizer, text = self._tokenizer, config.get_text_config()
        tokenizer.padding_side = "right"  # an encoder scores at its first token
        if text.pad_token_id is None and tokenizer.pad_token_id != tokenizer.eos_token_id:
            text.pad_token_id = tokenizer.pad_token_id
        is_known = text.pad_token_id is not None and 0 <= text.pad_token_id < len(tokenizer)
        # `pad` asks for a token even where it has nothing to pad.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(text.pad_token_id if is_known else 0)
        return is_known

    @torch.inference_mode()
    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> np.ndarray[Any, Any]:
        """Scores, [B] float64; the batch is cut into pieces of similar length.

        Args:
            prompts: [B], each a text or chat messages.
            responses: [B].
        """
        encoded = [self._encode(p, r) for p, r in zip(prompts, responses, strict=True)]
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
        scores = np.empty(len(encoded))
        for start in range(0, len(order), self._batch_size):
            rows = order[start : start + self._batch_size]
            inputs = self._tokenizer.pad([encoded[i] for i in rows], return_tensors="pt")
            logits = self._model(**inputs.to(self._device)).logits
            scores[rows] = logits[:, 0].double().cpu().numpy()
        return scores

    def _encode(self, prompt: Prompt, response: str) -> Any:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not self._tokenizer.chat_template:
            text = "\n".join(str(turn["content"]) for turn in turns)
            return self._tokenizer(text, response, truncation=True)
        messages = [*turns, {"role": "assistant", "content": response}]
        return self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
