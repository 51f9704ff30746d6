import itertools
import random
from pathlib import Path

import pytest
import torch

from verl_lab.config.schema import ModelConfig
from verl_lab.data.arithmetic import AddCompare, is_heldout
from verl_lab.models import tiny
from verl_lab.models.load import find, load_policy, load_tokenizer

TINY = ModelConfig(name_or_path="package://verl_lab/models/tiny_policy")


@pytest.fixture(scope="module")
def coder():
    return load_tokenizer(TINY)


def test_the_shipped_policy_is_small():
    files = Path(find(TINY.name_or_path).location).iterdir()
    assert sum(file.stat().st_size for file in files) <= 4 * 2**20


def test_a_token_is_a_character_and_text_comes_back_as_it_was(coder):
    text = "37+58=95 (>)"
    ids = coder.encode(text)
    assert len(ids) == len(text)
    assert coder.decode(ids) == text
    assert coder.decode([*ids, coder.eos_token_id], skip_special_tokens=True) == text


def test_it_is_right_sometimes_and_forgets_to_carry(coder):
    torch.set_num_threads(1)
    policy = load_policy(TINY, torch.device("cpu"), torch.float32)
    task = AddCompare()
    rows = task.problems("heldout", 128, seed=0)
    right = {True: [], False: []}
    for row in rows:
        ids = torch.tensor([coder.encode(row["prompt"])])
        out = policy.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        answer = coder.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        sloppy = "?" in row["prompt"] or _has_carry(row["prompt"])
        right[sloppy].append(task.score(answer, row))
    assert sum(right[False]) / len(right[False]) > 0.9
    assert sum(right[True]) / len(right[True]) < 0.3
    assert 0.3 < sum(map(sum, right.values())) / len(rows) < 0.6


def test_the_worked_problems_slip_as_often_as_they_say_and_train_on_no_held_out_one(coder):
    texts = []
    for ids, labels in itertools.islice(tiny.batches(64, seed=1), 80):
        for row, label in zip(ids, labels, strict=True):
            prompt = coder.decode(row[(label == -100) & (row != 0)])
            texts.append((prompt, coder.decode(label[label != -100][:-1])))
    assert not any(is_heldout(prompt) for prompt, _ in texts)
    carried = [(p, a) for p, a in texts if "+" in p and _has_carry(p)]
    wrong = sum(int(a) != _sum(p) for p, a in carried) / len(carried)
    expected = tiny.SLIP_SHARE + (1 - tiny.SLIP_SHARE) * tiny.STRAY_SHARE
    assert wrong == pytest.approx(expected, abs=0.05)


def test_a_forgotten_carry_costs_ten():
    source = random.Random(0)
    answers = {tiny.sloppy_answer("37+58=", "95", source) for _ in range(200)}
    assert answers >= {"95", "85"}
    assert answers <= {"95", "85", "94", "96"}


def test_a_build_writes_a_folder_that_loads_and_is_the_same_twice(tmp_path):
    for name in ("one", "other"):
        tiny.build(tmp_path / name, num_steps=2, batch_size=8, peak=1e-3)
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "other")]
    assert weights[0] == weights[1]
    config = ModelConfig(name_or_path=str(tmp_path / "one"))
    assert load_policy(config, torch.device("cpu"), torch.float32) is not None
    assert load_tokenizer(config).encode("1+1=") == [4, 13, 4, 17]


def _sum(prompt):
    return sum(int(number) for number in prompt[:-1].split("+"))


def _has_carry(prompt):
    a, b = (int(number) for number in prompt[:-1].split("+"))
    return a % 10 + b % 10 >= 10
