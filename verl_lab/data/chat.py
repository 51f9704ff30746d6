"""From what a user wrote to the token ids that a policy continues."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from verl_lab.errors import DataError

Messages = list[dict[str, Any]]


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

    Raises:
        DataError: there is no chat for messages or a system message to go through, or the template
            refuses them.
    """
    if not chat:
        if system is not None:
            raise DataError(
                "data.system_prompt: is set, but prompts do not go through a chat template; set "
                "data.chat to true, or leave it out"
            )
        if not isinstance(prompt, str):
            raise DataError(
                "data.chat: is false, but a prompt is a list of messages; set it to true"
            )
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except TemplateError as error:  # many templates know no system role
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"model.chat_template: refuses messages of {roles} ({error}); leave out what it "
            f"refuses, such as data.system_prompt, or give another template"
        ) from error
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
