"""Every benchmark runs, prints its table and writes its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_a_quick_run_prints_a_table_and_writes_the_figures(path, tmp_path):
    out = subprocess.run(
        [sys.executable, str(path), "--quick", "--json", str(tmp_path / "figures.json")],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures) >= 3
    assert all(name in out.stdout for name in figures)
