"""Does our trainer minimise what TRL minimises? Losses and gradients of both, side by side.

    python benchmarks/parity/compare.py --peers PYTHON [--json FILE] [--markdown FILE]

PYTHON belongs to an environment with TRL; `make parity` makes one. Both sides load the same small
models and samples and compute every case of `cases.py`. Exits with 1 if a row that should agree
does not, or one that is said to differ agrees.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case
from our_side import OurSide
from safetensors.torch import load_file
from setting import build
from torch import Tensor

TOLERANCE = 1e-5
HEADING = "## Rows\n\n"
"""Where the table begins in the file of `--markdown`."""
HEADER = ("TRL", "ours", "loss", "gradient", "verdict", "where and why a definition differs")
VERDICTS = {
    (True, True): "agrees",
    (True, False): "DIFFERS",
    (False, False): "differs, as said",
    (False, True): "AGREES, and the note says it differs",
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    ours: str
    loss_trl: float | None
    """None where only gradients or advantages are compared."""
    loss_ours: float | None
    loss_difference: float | None
    """Relative."""
    gradient_difference: float | None
    """The largest over all parameters, each relative to the parameter's largest gradient; or of
    advantages."""
    should_agree: bool
    note: str

    @property
    def agrees(self) -> bool:
        """Whether no difference is above the tolerance."""
        differences = (self.loss_difference, self.gradient_difference)
        return all(d is None or d <= TOLERANCE for d in differences)  # not so for nan

    @property
    def is_as_said(self) -> bool:
        """Whether it agrees where it should, and only there."""
        return self.agrees == self.should_agree

    @property
    def verdict(self) -> str:
        """In words; capitals where something is wrong."""
        return VERDICTS[self.should_agree, self.agrees]


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest of theirs; 0 where both are 0 everywhere."""
    largest = theirs.abs().max().item()
    difference = (ours.double() - theirs.double()).abs().max().item()
    return difference / largest if largest else (0.0 if difference == 0 else float("inf"))


def row(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> Row:
    """Compares what the two sides found.

    Args:
        case: what was computed.
        ours: `loss`, `gradients` or `advantages`.
        theirs: likewise.
    """
    mine, others = _tensors(ours), _tensors(theirs)
    if mine.keys() != others.keys() or not mine:
        raise ValueError(f"{case.name}: the sides have other tensors; compare like models")
    loss = None
    if "loss" in ours:
        loss = relative_difference(case.factor * _exact(ours["loss"]), _exact(theirs["loss"]))
    return Row(
        name=case.name,
        ours=", ".join(_settings(case.ours)),
        loss_trl=theirs.get("loss"),
        loss_ours=ours.get("loss"),
        loss_difference=loss,
        gradient_difference=_largest(
            [relative_difference(case.factor * mine[name], others[name]) for name in mine]
        ),
        should_agree=case.agrees,
        note=case.note,
    )


def _tensors(found: dict[str, Any]) -> dict[str, Tensor]:
    if "advantages" in found:
        return {"advantages": _exact(found["advantages"])}
    return found["gradients"]  # type: ignore[no-any-return]


def _largest(differences: list[float]) -> float:
    """Where one is nan, nan: `max` takes it or leaves it, as the order will have it."""
    return _exact(differences).max().item()


def _exact(numbers: float | list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _settings(ours: dict[str, Any]) -> Iterator[str]:
    for key, value in ours.items():
        if isinstance(value, dict):
            yield from _settings(value)
        else:
            yield f"{key}: {value}"


def trl_found(folder: Path, peers: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What TRL's side finds for each case, and the versions that it ran with."""
    script = Path(__file__).with_name("trl_side.py")
    done = subprocess.run(
        [peers, str(script), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(f"{done.stderr[-4000:]}\n{peers}: TRL's side failed; `make parity` installs TRL")
    figures = json.loads((folder / "trl.json").read_text())
    tensors = load_file(folder / "trl.safetensors")
    found = []
    for number in range(len(CASES)):
        prefix = f"{number}/"
        gradients = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        found.append({**figures[str(number)], "gradients": gradients})
    return found, figures["versions"]


def table(rows: list[Row], versions: str) -> str:
    """The rows in Markdown, with the versions above them."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for r in rows:
        differences = (
            "" if d is None else f"{d:.0e}" for d in (r.loss_difference, r.gradient_difference)
        )
        ours = f"`{r.ours}`" if r.ours else ""
        lines.append((r.name, ours, *differences, r.verdict, r.note))
    return "\n".join([versions, "", *(f"| {' | '.join(cells)} |" for cells in lines), ""])


def main() -> None:
    """Runs both sides, prints the table, and says by the exit code whether all is as said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True, help="the Python of an environment with TRL")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--markdown",
        type=Path,
        help="put the table into this file, in place of the one that is there",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        theirs, versions = trl_found(folder, options.peers)
        side = OurSide(folder)
        rows = [row(case, side.found(case), t) for case, t in zip(CASES, theirs, strict=True)]
    said = ", ".join(f"{name} {number}" for name, number in versions.items())
    mine = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    text = table(rows, f"TRL's side: {said}. Ours: {mine}.")
    sys.stdout.write(text)
    if options.markdown:
        before, heading, _ = options.markdown.read_text().partition(HEADING)
        options.markdown.write_text(f"{before}{heading}{text}")
    if options.json:
        options.json.write_text(json.dumps({r.name: asdict(r) for r in rows}, indent=2))
    wrong = [r for r in rows if not r.is_as_said]
    for r in wrong:
        sys.stderr.write(f"{r.name}: {r.verdict}\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
