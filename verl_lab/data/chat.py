"""From what a user wrote to the token ids that a policy continues, and those of a given answer."""

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
    return _rendered(_turns(prompt, system), tokenizer, is_begun=True)


def answer_ids(
    prompt: str | Messages,
    prompt_ids: list[int],
    answer: str,
    tokenizer: Any,
    *,
    chat: bool,
    system: str | None,
) -> list[int]:
    """The token ids that a policy would write to give an answer, the one that ends it included.

    In a chat it is what the template puts after the prompt, up to its end-of-turn token, which
    need not be that of the tokenizer. Without a chat, or where the template writes prompt and
    answer differently together, it is the tokens of the answer and the end of the sequence.

    Args:
        prompt: as given to `render`.
        prompt_ids: what `render` made of it.
        answer: a text, which may be empty.
        tokenizer: of transformers.
        chat: whether the chat template is used.
        system: as given to `render`.

    Raises:
        DataError: the tokenizer has no end of the sequence, or the template refuses the answer.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError(
            "model.name_or_path: its tokenizer has no end-of-sequence token, so no answer ends; "
            "set eos_token in its tokenizer_config.json"
        )
    if chat:
        turns = _turns(prompt, system)
        whole = _answered(turns, answer, tokenizer)
        rest = whole[len(prompt_ids) :]
        if rest and whole[: len(prompt_ids)] == prompt_ids:
            if end in rest:
                return rest[: rest.index(end) + 1]
            return _to_end_of_turn(rest, turns, answer, tokenizer) or [*rest, end]
    ids = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    return ids if ids[-1:] == [end] else [*ids, end]


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


def _to_end_of_turn(rest: list[int], turns: Messages, answer: str, tokenizer: Any) -> list[int]:
    """What was rendered, to the first special token behind the answer; nothing if there is none.

    A template may write special tokens in front of an answer too. Those behind it are in what is
    the same for an answer that ends otherwise.
    """
    other = _answered(turns, "1" if answer.rstrip().endswith("0") else "0", tokenizer)
    pairs = zip(reversed(rest), reversed(other), strict=False)
    same = next(
        (n for n, (mine, its) in enumerate(pairs) if mine != its), min(map(len, (rest, other)))
    )
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
    for place in range(len(rest) - same, len(rest)):
        if rest[place] in special:
            return rest[: place + 1]
    return []


def _answered(turns: Messages, answer: str, tokenizer: Any) -> list[int]:
    said = {"role": "assistant", "content": answer}
    return _rendered([*turns, said], tokenizer, is_begun=False)


def _turns(prompt: str | Messages, system: str | None) -> Messages:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None and turns[0].get("role") != "system":
        turns = [{"role": "system", "content": system}, *turns]
    return turns


def _rendered(messages: Messages, tokenizer: Any, *, is_begun: bool) -> list[int]:
    """The token ids of a chat, with the start of an answer if it is begun."""
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=is_begun, tokenize=True, return_dict=False
        )
    except TemplateError as error:  # many templates know no system role
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"model.chat_template: refuses messages of {roles} ({error}); leave out what it "
            f"refuses, such as data.system_prompt, or give another template"
        ) from error
    return list(ids)
