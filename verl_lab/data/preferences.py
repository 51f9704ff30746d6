"""A synthetic preference set over `add_compare`: what people want is the right answer, and some of
their labels are wrong.

    python -m verl_lab.data.preferences --to DIR

writes `sft.jsonl` (prompt, response), `pairs.jsonl` and `heldout_pairs.jsonl` (prompt, chosen,
rejected), `labels.jsonl` (prompt, response, label). Each row keeps the right `answer`, so the
task's verifier can judge what was learned. No problem of the held-out part is in the others.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from verl_lab.data.arithmetic import AddCompare

NOISE = 0.05
"""The share of pairs and labels that are the wrong way round."""
SLIPS = 0.3
"""The share of supervised responses that are wrong, as people's are."""


def slip(prompt: str, answer: str, source: random.Random) -> str:
    """A wrong answer of the kind that careless pupils give: a forgotten carry, one off, a digit too
    few, a sign the wrong way round."""
    if answer in "<>=":
        return source.choice([sign for sign in "<>=" if sign != answer])
    value = int(answer)
    a, b = (int(number) for number in prompt.rstrip("=").split("+"))
    kinds = [str(value + 1), str(max(value - 1, 0)), answer[:-1]]
    if a % 10 + b % 10 >= 10:
        kinds += [str(value - 10)] * 3
    wrong = [text for text in kinds if text and text != answer]
    return source.choice(wrong) if wrong else str(value + 1)


def write_preferences(to: Path, *, size: int = 4000, seed: int = 0) -> None:
    """Writes the four files into a folder.

    Args:
        to: is made if need be.
        size: rows of each training file; a tenth of that is held out.
        seed: fixes everything.
    """
    to.mkdir(parents=True, exist_ok=True)
    task, source = AddCompare(), random.Random(f"preferences/{seed}")
    problems = task.problems("train", size, seed)
    _write(to / "sft.jsonl", [_supervised(row, source) for row in problems])
    _write(to / "pairs.jsonl", [_pair(row, source, NOISE) for row in problems])
    _write(to / "labels.jsonl", [_labelled(row, source) for row in problems])
    heldout = task.problems("heldout", max(size // 10, 1), seed)
    _write(to / "heldout_pairs.jsonl", [_pair(row, source, 0.0) for row in heldout])


def _supervised(row: dict[str, str], source: random.Random) -> dict[str, Any]:
    is_slip = source.random() < SLIPS
    written = slip(row["prompt"], row["answer"], source) if is_slip else row["answer"]
    return {**row, "response": written}


def _pair(row: dict[str, str], source: random.Random, noise: float) -> dict[str, Any]:
    pair = [row["answer"], slip(row["prompt"], row["answer"], source)]
    if source.random() < noise:
        pair.reverse()
    return {**row, "chosen": pair[0], "rejected": pair[1]}


def _labelled(row: dict[str, str], source: random.Random) -> dict[str, Any]:
    is_right, is_mistaken = source.random() < 0.5, source.random() < NOISE
    written = row["answer"] if is_right else slip(row["prompt"], row["answer"], source)
    return {**row, "response": written, "label": is_right != is_mistaken}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Writes into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True, help="the folder to write")
    parser.add_argument("--size", type=int, default=4000, help="rows of each training file")
    parser.add_argument("--seed", type=int, default=0, help="fixes everything")
    options = parser.parse_args()
    write_preferences(options.to, size=options.size, seed=options.seed)


if __name__ == "__main__":
    main()
