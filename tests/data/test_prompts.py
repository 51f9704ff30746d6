import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_lab.data.prompts import load_prompts
from verl_lab.errors import DataError

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


def test_a_held_out_file_leaves_all_others_to_train_on(settings, tokenizer, tmp_path):
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
    assert (len(prompts.train), len(prompts.heldout)) == (6, 3)


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
