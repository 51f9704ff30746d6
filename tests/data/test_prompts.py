import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_lab.config.schema import ModelConfig
from verl_lab.data.prompts import load_prompts
from verl_lab.errors import DataError
from verl_lab.models.load import load_tokenizer

TINY = "package://verl_lab/models/tiny_policy"
NUMBERS = [f"{i}+1=" for i in range(20)]


@pytest.fixture
def numbers(settings):
    return settings(data={"prompts": NUMBERS, "heldout_size": 4})


def rows(n):
    return [{"question": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3} for i in range(n)]


def test_a_list_is_split_into_prompts_to_train_on_and_held_out_ones(numbers, tokenizer):
    prompts = load_prompts(numbers, tokenizer)
    assert len(prompts.train) == 16
    trained = set(prompts.train.peek(16)["prompt"])
    held = set(prompts.heldout["prompt"])
    assert len(held) == 4
    assert trained | held == set(NUMBERS)


def test_every_prompt_comes_once_an_epoch_and_each_epoch_has_its_order(numbers, tokenizer):
    source = load_prompts(numbers, tokenizer).train
    first, second = source.next(16), source.next(16)
    assert sorted(first["prompt"]) == sorted(second["prompt"])
    assert first["prompt"] != second["prompt"]
    assert first["group_id"] == list(range(16))
    assert second["group_id"] == list(range(16, 32))


def test_a_draw_may_cross_the_end_of_an_epoch(numbers, tokenizer):
    one, other = load_prompts(numbers, tokenizer).train, load_prompts(numbers, tokenizer).train
    whole = one.next(40)["prompt"]
    assert [p for n in (10, 13, 17) for p in other.next(n)["prompt"]] == whole


def test_a_resumed_source_goes_on_with_the_very_next_prompt(numbers, tokenizer):
    source = load_prompts(numbers, tokenizer).train
    source.next(21)
    state = json.loads(json.dumps(source.state()))
    expected = source.next(30)
    again = load_prompts(numbers, tokenizer).train
    again.restore(state)
    assert again.next(30).table.equals(expected.table)


def test_a_resume_on_changed_prompts_is_refused(numbers, settings, tokenizer):
    state = load_prompts(numbers, tokenizer).train.state()
    changed = settings(data={"prompts": [*NUMBERS[1:], "9+9="], "heldout_size": 4})
    with pytest.raises(DataError, match="the prompts have changed"):
        load_prompts(changed, tokenizer).train.restore(state)


def test_the_seed_fixes_the_order_and_shuffling_can_be_off(settings, tokenizer):
    def order(**more):
        data = {"prompts": NUMBERS, "heldout_size": 0, **more.pop("data", {})}
        return load_prompts(settings(data=data, **more), tokenizer).train.next(20)["prompt"]

    assert order(seed=1) == order(seed=1)
    assert order(seed=1) != order(seed=2)
    assert order(data={"shuffle": False}) == NUMBERS


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_files_bring_their_own_columns(settings, tokenizer, tmp_path, kind):
    path = tmp_path / ("folder" if kind == "datasets" else f"data.{kind}")
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows(10))) + "\n\n")
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows(10)), path)
    else:
        datasets.Dataset.from_list(rows(10)).save_to_disk(path)
    config = settings(data={"path": str(path), "prompt_column": "question", "heldout_size": 2})
    prompts = load_prompts(config, tokenizer)
    batch = prompts.train.next(8)
    assert len(prompts.heldout) == 2
    for prompt, answer, level in zip(batch["prompt"], batch["answer"], batch["level"], strict=True):
        number = int(prompt.split("+")[0])
        assert (answer, level) == (str(2 * number), number % 3)


def test_what_a_held_out_file_holds_is_never_trained_on(settings, tokenizer, tmp_path):
    for name, n in (("train", 6), ("test", 3)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows(n))))
    config = settings(
        data={
            "path": str(tmp_path / "train.jsonl"),
            "heldout_path": str(tmp_path / "test.jsonl"),
            "prompt_column": "question",
        }
    )
    prompts = load_prompts(config, tokenizer)
    assert (len(prompts.train), len(prompts.heldout), prompts.num_overlapping) == (3, 3, 3)


def test_prompts_that_are_too_long_are_left_out_and_counted(settings, tokenizer):
    given = ["1+1=", "1+1+1+1+1+1=", "2+2="]
    config = settings(data={"prompts": given, "max_prompt_tokens": 5, "heldout_size": 0})
    prompts = load_prompts(config, tokenizer)
    assert prompts.num_too_long == 1
    assert sorted(prompts.train.next(2)["prompt"]) == ["1+1=", "2+2="]
    config = settings(data={"prompts": given[:1], "max_prompt_tokens": 2, "heldout_size": 0})
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens: all 1 prompts are longer"):
        load_prompts(config, tokenizer)


def test_broken_data_names_the_place(settings, tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"

    def load(text, **more):
        path.write_text(text)
        load_prompts(settings(data={"path": str(path), **more}), tokenizer)

    with pytest.raises(DataError, match=r"data.jsonl:2 is no JSON"):
        load('{"prompt": "1"}\n{"prompt": ')
    with pytest.raises(
        DataError, match=r"data\.prompt_column: row 0 .* its columns are question, a"
    ):
        load('{"question": "1", "a": 2}')
    with pytest.raises(DataError, match="has no rows"):
        load("")
    (tmp_path / "data.csv").write_text("a")
    table = settings(data={"path": str(tmp_path / "data.csv")})
    with pytest.raises(DataError, match=r"no \.jsonl, no \.parquet"):
        load_prompts(table, tokenizer)


def test_a_task_brings_problems_that_are_never_in_both_sets(settings, tokenizer):
    config = settings(task={"name": "add_compare", "size": 500}, data={"heldout_size": 50})
    prompts = load_prompts(config, tokenizer)
    assert (len(prompts.train), len(prompts.heldout)) == (500, 50)
    assert not set(prompts.train.peek(500)["prompt"]) & set(prompts.heldout["prompt"])


def test_a_prompt_that_is_in_the_data_twice_is_never_in_both_sets(settings, tokenizer):
    prompts = load_prompts(settings(data={"prompts": NUMBERS * 2, "heldout_size": 4}), tokenizer)
    assert (len(prompts.train), len(prompts.heldout)) == (32, 8)
    assert not set(prompts.train.peek(32)["prompt"]) & set(prompts.heldout["prompt"])


def test_a_prompt_that_is_the_only_one_is_trained_on(settings, tokenizer):
    prompts = load_prompts(settings(data={"prompts": ["1+1="] * 10}), tokenizer)
    assert (len(prompts.train), len(prompts.heldout)) == (10, 0)


def test_chat_messages_become_the_text_that_the_policy_reads_and_are_kept(settings, tmp_path):
    messages = [{"role": "user", "content": "1+1="}]
    path = tmp_path / "chat.parquet"
    loose = [{**messages[0], "name": None}]  # table files give all messages the same keys
    pq.write_table(pa.Table.from_pylist([{"prompt": loose}]), path)
    tokenizer = load_tokenizer(
        ModelConfig(
            name_or_path=TINY,
            chat_template="{% for m in messages %}{{ m.content }}{{ m.name }}{% endfor %}?",
        )
    )
    config = settings(data={"path": str(path), "heldout_size": 0})
    batch = load_prompts(config, tokenizer).train.next(1)
    assert batch["prompt"] == ["1+1=?"]
    assert [json.loads(text) for text in batch["prompt_messages"]] == [messages]


def test_lists_of_the_data_stay_lists_and_dicts_become_json(settings, tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answers": ["2", "02"], "about": {"é": 1}}))
    batch = load_prompts(
        settings(data={"path": str(path), "heldout_size": 0}), tokenizer
    ).train.next(1)
    assert batch["answers"] == [["2", "02"]]
    assert batch["about"] == ['{"é": 1}']


@pytest.mark.parametrize("name", ["response", "reward", "reward/mine", "group_id", "prompt"])
def test_a_column_that_the_lab_would_write_over_is_refused(settings, tokenizer, tmp_path, name):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": "1+1=", name: "x"}))
    config = settings(data={"path": str(path), "prompt_column": "question"})
    with pytest.raises(DataError, match=rf"data\.path: .* called {name}; rename"):
        load_prompts(config, tokenizer)


def test_a_line_may_hold_what_other_texts_end_lines_with(settings, tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"prompt": "1+1=", "note": "a\u2028b\u0085c"}\r\n'.encode())
    batch = load_prompts(
        settings(data={"path": str(path), "heldout_size": 0}), tokenizer
    ).train.next(1)
    assert batch["note"] == ["a\u2028b\u0085c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.jsonl", b'{"prompt": "1"}\n{"prompt": "\xff"}', r"data\.jsonl:2 is no JSON"),
        ("data.jsonl", b'{"prompt": ["1"]}', r"row 0 .* the chat message '1'; a message has"),
        ("data.jsonl", b'{"prompt": "1", "a": 1}\n{"prompt": "1", "a": "x"}', r"the column a: can"),
        ("data.parquet", b"PAR2", r"data\.path: .* cannot be read as Parquet"),
    ],
)
def test_broken_files_are_refused_by_name(settings, tokenizer, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    config = settings(data={"path": str(tmp_path / name), "heldout_size": 0})
    with pytest.raises(DataError, match=message):
        load_prompts(config, tokenizer)


def test_a_task_whose_problems_are_all_held_out_says_so(settings, tokenizer):
    task = {"name": "basic_arithmetic", "size": 20, "min_terms": 2, "max_terms": 2}
    task |= {"min_digits": 1, "max_digits": 1, "operators": ["+"], "allow_parentheses": False}
    config = settings(task=task, data={"heldout_size": 3000})
    with pytest.raises(DataError, match=r"task\.size: the \d+ held-out problems of basic_arith"):
        load_prompts(config, tokenizer)
