import json
import random

import pytest

from verl_lab.data.arithmetic import is_heldout
from verl_lab.data.preferences import NOISE, slip, true_reward, write_preferences
from verl_lab.errors import ConfigError


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("response", "worth"),
    [
        ("95.", 1.0),
        ("<.", 1.0),
        (" 95 ", 0.5),
        ("95..", 0.0),
        ("95, 96.", 0.0),
        ("", 0.0),
        (".", 0),
    ],
)
def test_people_want_one_answer_and_a_full_stop(response, worth):
    assert true_reward(response) == worth


def test_a_slip_is_never_the_right_answer():
    source = random.Random(0)
    for prompt, answer in (("9+1=", "10"), ("0+0=", "0"), ("95+8=", "103"), ("3?4=", "<")):
        assert answer not in {slip(prompt, answer, source) for _ in range(50)}
    assert "93" in {slip("95+8=", "103", source) for _ in range(50)}  # the carry forgotten


def test_the_chosen_response_is_the_better_one_but_for_the_noise(tmp_path):
    write_preferences(tmp_path, size=1000)
    pairs = rows(tmp_path / "pairs.jsonl")
    wrong = [true_reward(row["chosen"]) < true_reward(row["rejected"]) for row in pairs]
    assert sum(wrong) / len(pairs) == pytest.approx(NOISE, abs=0.02)
    held = rows(tmp_path / "heldout_pairs.jsonl")
    assert all(true_reward(row["chosen"]) > true_reward(row["rejected"]) for row in held)


def test_nothing_held_out_is_in_the_training_files(tmp_path):
    write_preferences(tmp_path, size=200)
    for name in ("sft", "pairs", "labels", "prompts"):
        assert not any(is_heldout(row["prompt"]) for row in rows(tmp_path / f"{name}.jsonl"))
    assert all(is_heldout(row["prompt"]) for row in rows(tmp_path / "heldout_pairs.jsonl"))


def test_the_seed_fixes_every_file(tmp_path):
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_preferences(tmp_path / folder, size=50, seed=seed)
    for path in (tmp_path / "a").iterdir():
        assert path.read_text() == (tmp_path / "b" / path.name).read_text()
        assert path.read_text() != (tmp_path / "c" / path.name).read_text()


def test_every_character_is_one_that_the_shipped_policy_can_write(tmp_path, tokenizer):
    write_preferences(tmp_path, size=300)
    for path in tmp_path.iterdir():
        for row in rows(path):
            text = "".join(row.get(k, "") for k in ("prompt", "response", "chosen", "rejected"))
            assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_more_rows_than_there_are_problems_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="enough distinct problems for 1 to 5000"):
        write_preferences(tmp_path, size=50_000)
