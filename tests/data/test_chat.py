import pytest
from jinja2 import TemplateError

from verl_lab.data.chat import render, wants_chat
from verl_lab.errors import DataError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Characters:
    """A tokenizer whose tokens are characters, and which begins plain text with token 0."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def __call__(self, text):
        return {"input_ids": [0, *map(ord, text)]}

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, return_dict):
        assert (add_generation_prompt, tokenize, return_dict) == (True, True, False)
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
        return [0, *map(ord, text)]


def text(ids):
    assert ids.count(0) == 1, "one beginning-of-sequence token"
    return "".join(map(chr, ids[1:]))


def test_plain_text_goes_through_the_tokenizer_alone():
    assert text(render("hi", Characters(), chat=False, system=None)) == "hi"


def test_a_prompt_becomes_a_users_turn_with_the_answer_begun():
    coder = Characters(TEMPLATE)
    assert text(render("hi", coder, chat=True, system=None)) == "<user>hi<assistant>"
    assert text(render("hi", coder, chat=True, system="be kind")) == (
        "<system>be kind<user>hi<assistant>"
    )


def test_messages_keep_their_own_system_message():
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    found = text(render(messages, Characters(TEMPLATE), chat=True, system="other"))
    assert found == "<system>own<user>hi<assistant>"


def test_chat_is_used_where_there_is_a_template_unless_the_config_says_otherwise():
    assert wants_chat(None, Characters(TEMPLATE))
    assert not wants_chat(None, Characters())
    assert not wants_chat(False, Characters(TEMPLATE))
    with pytest.raises(DataError, match=r"data\.chat: is true, but .* set model\.chat_template"):
        wants_chat(True, Characters())


def test_messages_without_chat_are_refused():
    with pytest.raises(DataError, match=r"data\.chat: is false"):
        render([{"role": "user", "content": "hi"}], Characters(), chat=False, system=None)


def test_a_system_prompt_that_nothing_would_read_is_refused():
    with pytest.raises(DataError, match=r"data\.system_prompt: is set, but .* set data\.chat"):
        render("hi", Characters(), chat=False, system="be kind")


def test_a_template_that_knows_no_system_role_says_what_to_leave_out():
    class Picky(Characters):
        def apply_chat_template(self, messages, **how):
            raise TemplateError("System role not supported")

    with pytest.raises(DataError, match=r"refuses messages of system, user .*System role"):
        render("hi", Picky(TEMPLATE), chat=True, system="be kind")
