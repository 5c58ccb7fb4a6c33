"""The glossary holds: retired words stand in no name, and a class name means one thing in the whole package."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import fckpt

PACKAGE = Path(fckpt.__file__).parent
GLOSSARY = PACKAGE.parent / "docs" / "glossary.md"
ELSEWHERE = {"lift": {"lift_fresh"}, "windows": set()}
"""Names of others that contain a retired word: operations of torch."""


def rows() -> list[list[str]]:
    """The rows of the table: word, meaning, words that are not used for it."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(path: Path) -> list[tuple[str, str]]:
    """The modules, classes and functions that a file defines, as (kind, name)."""
    found = [("module", part.removesuffix(".py")) for part in path.relative_to(PACKAGE.parent).parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            found.append(("class", node.name))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(("function", node.name))
    return found


def words(name: str) -> set[str]:
    """The words of a name in snake case or camel case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)}


def test_the_table_is_whole() -> None:
    table = rows()
    assert len(table) >= 30
    assert all(len(row) == 3 and row[0] and row[1].endswith(".") for row in table)
    assert [row[0] for row in table] == sorted({row[0] for row in table})


def test_no_word_is_both_used_and_retired() -> None:
    used = {row[0] for row in rows()}
    assert not used & {word for row in rows() for word in re.findall(r"`(\w+)`", row[2])}


def test_no_retired_word_stands_in_a_name() -> None:
    retired = {word for row in rows() for word in re.findall(r"`(\w+)`", row[2])}
    assert {"habits", "crossing", "seeds", "tape"} <= retired
    for path in PACKAGE.rglob("*.py"):
        for kind, name in names(path):
            wrong = {word for word in retired & words(name) if name not in ELSEWHERE.get(word, ())}
            assert not wrong, f"{path.relative_to(PACKAGE)}: {kind} {name} uses {sorted(wrong)}; see docs/glossary.md"


def test_a_class_name_means_one_thing() -> None:
    classes = Counter(name for path in PACKAGE.rglob("*.py") for kind, name in names(path) if kind == "class")
    assert not [name for name, count in classes.items() if count > 1 and not name.startswith("_")]
