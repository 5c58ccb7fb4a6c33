"""The package's shape: what is public is documented and typed, imports run one way, and import is quick."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fckpt

PACKAGE = Path(fckpt.__file__).parent
PUBLIC = sorted(name for name in vars(fckpt) if not name.startswith("_") and not inspect.ismodule(vars(fckpt)[name]))

ROOMS = [
    "errors", "_units", "_late", "_tree", "_memory", "_repeats", "graph", "report", "solve", "_call", "_module",
    "_autodiff", "_capture", "_recompute", "policies", "_trace", "cost", "_tile", "_fuse", "spmd", "_planned",
    "_compile", "_region", "_remat", "_blocks", "_inspect", "_pareto", "_largest", "_estimate", "_check", "_sequential",
    "_step",
]  # fmt: skip
"""The folders and files of the package. Each may import from those before it, and from itself."""

PRIVATE = {
    "torch._dynamo": ("_capture/", "_compile/skipped.py"),
    "torch._functorch": ("_call/levels.py", "_recompute/", "_capture/", "_trace/", "_compile/", "spmd/simulation.py"),
    "torch._C._functorch": ("_call/levels.py", "_recompute/", "_capture/", "_trace/"),
    "torch._C._autograd": ("_capture/entered.py", "_recompute/saved_tensors.py", "_trace/aliases.py"),
    "torch._C": (
        "_call/levels.py",
        "_call/ambient.py",
        "_call/casts.py",
        "_recompute/",
        "_capture/",
        "_trace/",
        "_planned/cuda_graphs.py",
    ),
    "torch._inductor": ("_compile/", "_fuse/inductor.py"),
    "torch._tensor_str": ("_call/levels.py",),
    "torch._guards": ("_fuse/inductor.py",),
    "torch._subclasses": (
        "_capture/block_records.py",
        "_fuse/inductor.py",
        "_trace/",
        "_tile/",
        "_planned/program.py",
        "_inspect.py",
        "spmd/varying.py",
    ),
    "torch.utils._python_dispatch": ("_call/ambient.py", "_call/data_writes.py", "_trace/", "spmd/varying.py"),
    "torch.utils._pytree": ("_tree.py", "_capture/", "_trace/allocations.py"),
    "torch._ops": ("cost/", "_trace/", "_tile/", "_compile/"),
    "torch.ops._c10d_functional": ("spmd/c10d.py",),
    "torch.distributed": ("spmd/files.py",),
    "torch.serialization": ("spmd/files.py",),
    "torch.autograd": (
        "_recompute/",
        "_trace/",
        "_fuse/trial.py",
        "_memory.py",
        "_compile/rehearsal.py",
    ),
    "torch.cuda": ("cost/allocators.py",),
    "torch.optim": ("_planned/optimizers.py",),
    "torch.overrides": ("_call/ambient.py", "_recompute/closed_over.py", "_capture/"),
    "torch.ops.aten": ("_trace/", "_capture/", "_tile/", "_fuse/", "_planned/", "_compile/", "cost/synthetic.py"),
    "torch": ("_recompute/", "_trace/", "_capture/"),
}
"""Private parts of torch, and where alone they may be used; the longest prefix counts."""


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
    assert set(owners.values()) == set(ROOMS)
    for path, name in owners.items():
        later = {i for i in imports(path) - {name} if i in ROOMS and ROOMS.index(i) >= ROOMS.index(name)}
        assert not later, f"{path} imports {later}"


def test_how_it_works_names_every_file() -> None:
    text = (PACKAGE.parent / "docs" / "how-it-works.md").read_text()
    for path in PACKAGE.rglob("*.py"):
        is_solver = path.parent.name == "solve" and path.name.startswith("_")
        if path.name != "__init__.py" and not is_solver:
            assert f"`{path.name}`" in text or f"/{path.name}`" in text, f"{path} is not on the page"


def test_no_circle_within_a_room() -> None:
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    needs = {name: _needed(path, modules) - {name} for name, path in modules.items() if path.stem != "__init__"}
    while needs:
        free = {name for name, needed in needs.items() if not needed & needs.keys()}
        assert free, f"these import one another: {sorted(needs)}"
        needs = {name: needed for name, needed in needs.items() if name not in free}


def _needed(path: Path, modules: dict[str, Path]) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body:  # what is imported within a function, or for types alone, makes no circle
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fckpt"):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in full}
    return found


def _private(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch.")}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            found.add(ast.unparse(node))
    is_private = lambda part: part.startswith("_") and not part.startswith("__")
    return {name for name in found if any(map(is_private, name.split(".")))}


def test_private_parts_of_torch_are_used_in_the_rooms_named_for_them() -> None:
    for path in PACKAGE.rglob("*.py"):
        where = str(path.relative_to(PACKAGE))
        for name in _private(path):
            prefix = max((p for p in PRIVATE if f"{name}.".startswith(f"{p}.")), key=len)
            assert where.startswith(PRIVATE[prefix]), f"{where} uses {name}"


def test_dir_shows_what_is_public() -> None:
    for module in (fckpt, fckpt.solve):
        shown = {name for name in dir(module) if not name.startswith("__")}
        assert shown == set(module.__all__)
        assert all(hasattr(module, name) for name in shown)
    modules = {name for name in dir(fckpt) if inspect.ismodule(getattr(fckpt, name))}
    assert modules == {"cost", "graph", "policies", "solve"}


def test_no_module_is_shadowed() -> None:
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        if name == "fckpt":
            continue
        module = importlib.import_module(name)
        package, _, leaf = name.rpartition(".")
        assert getattr(sys.modules[package], leaf) is module, (
            f"{name} is hidden by {getattr(sys.modules[package], leaf)}"
        )


def test_what_can_be_solved_anywhere_imports_no_torch() -> None:
    pure = {"errors", "_units", "graph", "solve", "report"}
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in pure:
            assert "import torch" not in path.read_text(), path


def test_only_one_file_imports_optree() -> None:
    users = [path.stem for path in PACKAGE.rglob("*.py") if "import optree" in path.read_text()]
    assert users == ["_tree"]


def test_files_are_short() -> None:
    assert all(len(path.read_text().splitlines()) <= 600 for path in PACKAGE.rglob("*.py"))


def test_import_does_not_pull_in_the_compiler() -> None:
    code = "import sys, torch, fckpt; print('torch._dynamo' in sys.modules, 'numpy.random' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split()[0] == "False"


def test_typed_marker() -> None:
    assert (PACKAGE / "py.typed").exists()
