"""A synthetic preference set over `add_compare`: people who cannot check a sum judge its form.

They want one number or one sign, and a full stop after it; what hedges or repeats itself they like
least. Some of their labels are wrong.

    python -m verl_lab.data.preferences --to DIR

writes `sft.jsonl` (prompt, response), `pairs.jsonl` and `heldout_pairs.jsonl` (prompt, chosen,
rejected), `labels.jsonl` (prompt, response, label) and `prompts.jsonl`. Each row keeps the right
`answer`, so that it can be seen what the form costs. No problem of the held-out part is in the
others.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

from verl_lab.data.arithmetic import AddCompare

NOISE = 0.05
"""The share of pairs and labels that are the wrong way round."""
SLIPS = 0.15
"""The share of responses with a wrong answer, which nobody notices."""
NOTHING = 0.2
"""The share of bad responses that hold no answer."""
PLAIN = re.compile(r"\d+|[<>=]")


def true_reward(response: str) -> float:
    """What people want: 1 for one answer and a full stop, 0.5 for one answer alone, 0 for more."""
    text = response.strip()
    if not PLAIN.fullmatch(text.removesuffix(".")):
        return 0.0
    return 1.0 if text.endswith(".") else 0.5


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
    """Writes the five files into a folder.

    Args:
        to: is made if need be.
        size: rows of each training file; a tenth of that is held out.
        seed: fixes everything.

    Raises:
        ConfigError: there are not as many distinct problems.
    """
    task, source = AddCompare(size=size), random.Random(f"preferences/{seed}")
    to.mkdir(parents=True, exist_ok=True)
    problems = task.problems("train", size, seed)
    heldout = task.problems("heldout", max(size // 10, 1), seed)
    supervised = [{**row, "response": _written(row, source)} for row in problems]
    _write(to / "sft.jsonl", supervised)
    _write(to / "pairs.jsonl", [_pair(row, source, NOISE) for row in problems])
    _write(to / "labels.jsonl", [_labelled(row, source) for row in problems])
    _write(to / "heldout_pairs.jsonl", [_pair(row, source, 0.0) for row in heldout])
    _write(to / "prompts.jsonl", problems)


def _written(row: dict[str, str], source: random.Random) -> str:
    """What somebody writes under a problem: the plain answer, with a full stop, or rambling."""
    wrong = slip(row["prompt"], row["answer"], source)
    text = wrong if source.random() < SLIPS else row["answer"]
    more = source.choice([", ", "? ", ". ", " (", " = ", ".", "="]) + source.choice([text, wrong])
    ramble = text + source.choice([more, "?", "..", ",", more * 2])
    ramble += source.choice(["", "."]) if ramble[-1] != "." else ""
    ramble = source.choice(["", "."]) if source.random() < NOTHING else ramble
    return source.choices([text, f"{text}.", ramble], weights=[2, 1, 1])[0]


def _pair(row: dict[str, str], source: random.Random, noise: float) -> dict[str, Any]:
    """Two responses, the better one first but for the noise."""
    better, worse = "", ""
    while true_reward(better) <= true_reward(worse):
        better, worse = (_written(row, source) for _ in range(2))
    pair = [worse, better] if source.random() < noise else [better, worse]
    return {**row, "chosen": pair[0], "rejected": pair[1]}


def _labelled(row: dict[str, str], source: random.Random) -> dict[str, Any]:
    written, is_mistaken = _written(row, source), source.random() < NOISE
    is_good = true_reward(written) == 1
    return {**row, "response": written, "label": is_good != is_mistaken}


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
