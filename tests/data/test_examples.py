import json

import numpy as np
import pytest

from verl_lab.batch.pack import pack
from verl_lab.config.load import load_config
from verl_lab.data.examples import as_prompts
from verl_lab.data.prompts import load_prompts
from verl_lab.errors import DataError
from verl_lab.models.load import load_tokenizer

POLICY = "package://verl_lab/models/tiny_policy"
TEMPLATE = (
    "{% for m in messages %}{{ '<' if m.role == 'user' else '>' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}.{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
)
"""Ends an answer with the end of the sequence, and writes a full stop after it."""


@pytest.fixture
def prompts(tmp_path):
    """Loads rows by a recipe: `prompts("sft", rows, **data)`."""

    def load(recipe, rows, *, model=None, max_new_tokens=8, **data):
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        config = load_config(
            {
                "model": {"name_or_path": POLICY, **(model or {})},
                "recipe": recipe,
                "data": {"path": str(file), "shuffle": False, "heldout_size": 0, **data},
                "rollout": {"max_new_tokens": max_new_tokens},
            }
        )
        return load_prompts(config, load_tokenizer(config.model))

    return load


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(load_config({"model": {"name_or_path": POLICY}}).model)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_given_response_is_what_the_policy_would_have_written_with_its_end(prompts, tokenizer):
    found = prompts("sft", [{"prompt": "1+1=", "response": "2", "source": "me"}]).train.next(1)
    assert found["prompt_ids"] == [ids(tokenizer, "1+1=")]
    assert found["response_ids"] == [[*ids(tokenizer, "2"), tokenizer.eos_token_id]]
    assert found["response_mask"] == [[True, True]]
    assert found["source"] == ["me"]
    assert found["group_id"] == [0]
    assert pack(found, "cpu").target_ids.tolist() == found["response_ids"][0]


def test_a_completion_is_a_response_by_another_name(prompts):
    found = prompts("sft", [{"prompt": "1+1=", "completion": "2"}]).train.next(1)
    assert found["response"] == ["2"]


def test_the_chosen_and_the_rejected_of_a_pair_are_one_group_in_this_order(prompts):
    rows = [
        {"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0", "margin": n} for n in range(3)
    ]
    source = prompts("reward_model", rows).train
    assert len(source) == 3
    found = source.next(2)
    assert found["group_id"] == [0, 0, 1, 1]
    assert found["sample_id"] == [0, 1, 0, 1]
    assert found["is_chosen"] == [True, False, True, False]
    assert found["response"] == ["1", "0", "2", "0"]
    assert found["margin"] == [0.0, 0.0, 1.0, 1.0]
    assert source.next(2)["prompt"] == ["2+1=", "2+1=", "0+1=", "0+1="]


def test_drawing_goes_on_where_a_saved_state_was(prompts):
    rows = [{"prompt": f"{n}+1=", "chosen": "1", "rejected": "0"} for n in range(5)]
    source = prompts("dpo", rows).train
    source.next(2)
    state = source.state()
    expected = source.next(2)["prompt"]
    again = prompts("dpo", rows).train
    again.restore(state)
    assert again.next(2)["prompt"] == expected
    other = prompts("dpo", [{**row, "rejected": "2"} for row in rows]).train
    with pytest.raises(DataError, match="have changed"):
        other.restore(state)


def test_labels_say_which_single_responses_are_good(prompts):
    rows = [
        {"prompt": "1+1=", "response": "2", "label": True},
        {"prompt": "1+2=", "response": "2", "label": False},
    ]
    found = prompts("kto", rows).train.next(2)
    assert found["is_chosen"] == [True, False]
    with pytest.raises(DataError, match=r"row 0 of data\.path has the label 'yes'"):
        prompts("kto", [{**rows[0], "label": "yes"}])


def test_a_pair_with_one_response_that_is_too_long_is_left_out_as_a_whole(prompts):
    rows = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "1+2=", "chosen": "3", "rejected": "3" * 20},
        {"prompt": "1+" * 30, "chosen": "3", "rejected": "4"},
    ]
    found = prompts("dpo", rows, max_prompt_tokens=20)
    assert (len(found.train), found.num_too_long) == (1, 2)
    with pytest.raises(DataError, match=r"all 1 prompts are longer .*rollout.max_new_tokens=8"):
        prompts("dpo", rows[1:2])


def test_in_a_chat_the_template_writes_the_answer_and_its_end(prompts, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "response": "2"}]
    found = prompts("sft", rows, model={"chat_template": TEMPLATE}).train.next(1)
    assert found["prompt_ids"] == [ids(tokenizer, "<1+1>")]
    assert found["response_ids"] == [[*ids(tokenizer, "2"), tokenizer.eos_token_id]]


def test_whole_conversations_are_split_before_the_answer(prompts, tokenizer):
    user = {"role": "user", "content": "1+1"}

    def answer(text):
        return {"role": "assistant", "content": text}

    chat = {"chat_template": TEMPLATE}
    found = prompts("sft", [{"messages": [user, answer("2")]}], model=chat).train.next(1)
    assert found["response"] == ["2"]
    rows = [{"chosen": [user, answer("2")], "rejected": [user, answer("3")]}]
    found = prompts("dpo", rows, model=chat).train.next(1)
    assert found["response"] == ["2", "3"]
    assert found["prompt_ids"][0] == found["prompt_ids"][1] == ids(tokenizer, "<1+1>")
    with pytest.raises(DataError, match="do not end with an assistant's answer"):
        prompts("sft", [{"messages": [user]}], model=chat)


@pytest.mark.parametrize(
    ("recipe", "row", "said"),
    [
        ("sft", {"prompt": "1"}, "row 0 of data.path has no response or completion"),
        ("dpo", {"prompt": "1", "chosen": "2"}, "has no rejected; its columns are prompt, chosen"),
        ("dpo", {"chosen": "1", "rejected": "2"}, "no prompt in 'prompt'"),
    ],
)
def test_a_row_that_lacks_a_column_is_named(prompts, recipe, row, said):
    with pytest.raises(DataError, match=said):
        prompts(recipe, [row])


def test_a_task_gives_its_answers_and_makes_up_worse_ones():
    config = load_config(
        {
            "model": {"name_or_path": POLICY},
            "recipe": "dpo",
            "task": {"name": "add_compare", "size": 50},
        }
    )
    found = load_prompts(config, load_tokenizer(config.model))
    drawn = found.train.next(20)
    answers, responses = drawn["answer"], drawn["response"]
    assert all(
        (a == r) == c for a, r, c in zip(answers, responses, drawn["is_chosen"], strict=True)
    )
    assert not set(found.heldout["prompt"]) & set(drawn["prompt"])


def test_prompts_are_what_is_left_without_the_responses(prompts):
    rows = [{"prompt": f"{n}+1=", "chosen": "1", "rejected": "0", "answer": n} for n in range(3)]
    drawn = prompts("dpo", rows).train.next(2)
    scored = drawn.with_columns({"reward": np.ones(4), "reward/task": np.ones(4)})
    found = as_prompts(scored)
    assert found["prompt"] == ["0+1=", "1+1="]
    assert set(found.names) == {"group_id", "prompt", "prompt_ids", "answer"}
