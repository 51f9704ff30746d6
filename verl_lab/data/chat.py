"""From what a user wrote to the token ids that a policy continues."""

from __future__ import annotations

from typing import Any

from verl_lab.errors import DataError

Messages = list[dict[str, str]]


def render(prompt: str | Messages, tokenizer: Any, *, chat: bool, system: str | None) -> list[int]:
    """The token ids of a prompt.

    In a chat the template writes every special token, the start of the answer included; otherwise
    the tokenizer adds those it adds to any text. So there is never a second beginning-of-sequence
    token.

    Args:
        prompt: a text, or chat messages with `role` and `content`.
        tokenizer: of transformers.
        chat: whether the chat template is used.
        system: a system message to put first, unless the messages have one.
    """
    if not chat:
        if not isinstance(prompt, str):
            raise DataError(
                "data.chat: is false, but a prompt is a list of messages; set it to true"
            )
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(ids)


def wants_chat(configured: bool | None, tokenizer: Any) -> bool:
    """Whether prompts go through the chat template; by default where the tokenizer has one.

    Raises:
        DataError: it is asked for and there is none.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if configured and not has_template:
        raise DataError(
            "data.chat: is true, but the tokenizer has no chat template; set model.chat_template"
        )
    return has_template if configured is None else configured
