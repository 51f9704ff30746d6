"""The structure: imports go down only, files and signatures stay small, the front starts light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import verl_lab

ROOT = Path(verl_lab.__file__).parent
LAYERS = [
    "errors",
    "config algos",
    "batch",
    "store",
    "data rewards",
    "models",
    "runtime engines",
    "controller",
    "session",
    "widgets report probe",
    "cli",
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer.split()}
MAX_LINES = 400
MAX_POSITIONAL = 6
VAGUE = {"utils", "util", "common", "helpers", "misc", "core", "manager"}
LIGHT = ["verl_lab", "verl_lab.config.load", "verl_lab.cli.app", "verl_lab.cli.commands"]
LIGHT += ["verl_lab.session.session"]
HEAVY = ["torch", "transformers", "pandas", "pyarrow", "numpy", "datasets", "reasoning_gym"]

FILES = sorted(ROOT.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])


def part(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported_parts(tree):
    """The parts of verl_lab that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from verl_lab import config` names a part in its list.
            whole = node.module == "verl_lab"
            names |= {f"verl_lab.{a.name}" for a in node.names} if whole else {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    names.discard("verl_lab.__version__")
    return {name.split(".")[1] for name in names if name.startswith("verl_lab.")}


def functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


@every_file
def test_a_file_imports_only_its_own_part_and_lower_layers(path):
    if path == ROOT / "__init__.py":
        return
    here = part(path)
    up = {p for p in imported_parts(ast.parse(path.read_text())) if p != here}
    unknown = up - RANK.keys()
    assert not unknown, f"import {sorted(unknown)} from the module that defines it"
    up = {p for p in up if RANK[p] >= RANK[here]}
    assert not up, f"{here} (layer {RANK[here]}) may not import {sorted(up)}"


@every_file
def test_imports_name_the_whole_path(path):
    relative = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, f"relative imports in lines {relative}"


@every_file
def test_no_file_is_too_long(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@every_file
def test_no_function_takes_many_arguments_by_position(path):
    many = {}
    for function in functions(ast.parse(path.read_text())):
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        names = [name for name in names if name not in ("self", "cls")]
        if len(names) > MAX_POSITIONAL:
            many[function.name] = len(names)
    assert not many, f"put a * before the later arguments of {many}"


@every_file
def test_a_file_is_named_after_what_it_holds(path):
    assert not VAGUE & set(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize(
    "module",
    [
        "verl_lab",
        "verl_lab.config.load",
        "verl_lab.cli.app",
        "verl_lab.cli.commands",
        "verl_lab.session",
    ],
)
def test_starts_without_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["verl_lab", "verl_lab.cli.app"])
def test_starts_without_heavy_modules(module):
    code = f"import {module}, sys; print(*(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""
