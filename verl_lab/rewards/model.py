"""Reward models: Hugging Face sequence classifiers that score a response to a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from verl_lab.errors import DataError

BATCH_SIZE = 16


class RewardModel:
    """Scores texts with the first output of a sequence classifier.

    A tokenizer with a chat template sees a user's turn and an assistant's; another sees a pair of
    texts, as reward models such as OpenAssistant's were trained.

    Args:
        name_or_path: a Hugging Face id or a folder.
        device: what torch calls the device.
    """

    def __init__(self, name_or_path: str, device: str) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name_or_path)
            model = AutoModelForSequenceClassification.from_pretrained(
                name_or_path, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"reward_model.name_or_path: {name_or_path} cannot be loaded; name a folder or an "
                f"id of a "
                f"sequence classifier with safetensors weights\n{error}"
            ) from error
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def score(self, prompts: list[str], responses: list[str]) -> np.ndarray[Any, Any]:
        """Scores, [B] float64; the batch is cut into pieces of similar length."""
        encoded = [self._encode(p, r) for p, r in zip(prompts, responses, strict=True)]
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
        scores = np.empty(len(encoded))
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            inputs = self._tokenizer.pad([encoded[i] for i in rows], return_tensors="pt")
            logits = self._model(**inputs.to(self._device)).logits
            scores[rows] = logits[:, 0].double().cpu().numpy()
        return scores

    def _encode(self, prompt: str, response: str) -> Any:
        if not self._tokenizer.chat_template:
            return self._tokenizer(prompt, response, truncation=True)
        turns = [("user", prompt), ("assistant", response)]
        messages = [{"role": role, "content": content} for role, content in turns]
        return self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
