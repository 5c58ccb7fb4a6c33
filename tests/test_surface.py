"""The package's shape: what is public is documented and typed, imports run one way, and import is quick."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fckpt

PACKAGE = Path(fckpt.__file__).parent
PUBLIC = sorted(name for name in vars(fckpt) if not name.startswith("_") and not inspect.ismodule(vars(fckpt)[name]))

# Each file may import from those before it.
ORDER = [
    "errors", "units", "progress", "ledger", "tree", "rng", "ambient", "casts", "kept", "places", "facts", "closure",
    "modules", "shadow", "conditions", "sources", "_capture", "reads", "arguments", "replay", "segment", "lift",
    "batched", "primitives", "transform", "compiled", "graph", "identity", "naming", "decisions", "policies",
    "operations", "layouts", "in_place", "levels", "assemble", "lifetimes", "record", "aliases", "effects", "trace",
    "memory", "cost", "schedule", "simulate", "solve", "report", "lower", "run", "module", "autodiff", "plans",
    "spmd", "planner", "repeats", "api", "blocks", "looking", "check", "segments",
]  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    value = getattr(fckpt, name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    if inspect.isfunction(value):
        doc = inspect.getdoc(value) or ""
        assert "Example" in doc, f"{name} shows no example"
        assert all(p.annotation is not p.empty for p in inspect.signature(value).parameters.values())


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "fckpt":
                found |= {alias.name for alias in node.names}
            elif node.module.startswith("fckpt."):
                found.add(node.module.split(".")[1])
    return found


def test_imports_run_one_way() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    owners = {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in files}
    assert set(owners.values()) == set(ORDER)
    for path, name in owners.items():
        later = {i for i in imports(path) - {name} if i in ORDER and ORDER.index(i) >= ORDER.index(name)}
        assert not later, f"{name} imports {later}"


def test_what_can_be_solved_anywhere_imports_no_torch() -> None:
    pure = {"errors", "units", "graph", "schedule", "simulate", "solve", "report"}
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in pure:
            assert "import torch" not in path.read_text(), path


def test_only_tree_imports_optree() -> None:
    users = [path.stem for path in PACKAGE.rglob("*.py") if "import optree" in path.read_text()]
    assert users == ["tree"]


def test_files_are_short() -> None:
    assert all(len(path.read_text().splitlines()) <= 600 for path in PACKAGE.rglob("*.py"))


def test_import_does_not_pull_in_the_compiler() -> None:
    code = "import sys, torch, fckpt; print('torch._dynamo' in sys.modules, 'numpy.random' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split()[0] == "False"


def test_typed_marker() -> None:
    assert (PACKAGE / "py.typed").exists()
