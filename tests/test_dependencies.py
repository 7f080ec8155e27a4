"""Everything that is imported is declared, and the core runs with nothing but the core's dependencies."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedstrata"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "vl_convert": "vl-convert-python"}
"""The distributions of modules that are called otherwise."""
BROUGHT_ALONG = {"triton", "IPython"}
"""Come with builds of PyTorch for CUDA, and with notebooks; they are used where they are found to be there."""
CORE = {"torch", "numpy", "pyarrow", "safetensors", "scikit-learn", "scipy", "pillow", "typer", "rich"}


def normalised(name):
    return re.split(r"[^A-Za-z0-9._-]", DISTRIBUTIONS.get(name, name))[0].lower().replace("_", "-")


def declared(requirements):
    return {normalised(requirement) for requirement in requirements}


def imported_by(node):
    """Name the modules that a statement or call imports: by the keyword, or by a text given to ``import_module``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.level == 0 else []
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return [node.args[0].value] if called == "import_module" else []
    return []


def foreign_imports(nodes):
    tops = {module.split(".")[0] for node in nodes for module in imported_by(node)}
    return {normalised(top) for top in tops - set(sys.stdlib_module_names) - BROUGHT_ALONG - {"fedstrata"}}


def at_import(tree):
    """Walk through what runs when a module is imported: not functions, and not what is for type checkers only."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
EXTRAS = {extra: declared(requirements) for extra, requirements in PROJECT["optional-dependencies"].items()}
TOOLS = ("dev", "docs", "mutants", "release")
"""Extras with programs for those who work on FedStrata, which it does not import."""
OPTIONAL = set().union(*(names for extra, names in EXTRAS.items() if extra not in TOOLS)) - CORE


def test_what_is_imported_is_declared():
    known = declared(PROJECT["dependencies"]) | OPTIONAL
    for path, tree in TREES.items():
        assert foreign_imports(ast.walk(tree)) <= known, path


def test_what_is_declared_is_imported():
    imported = set().union(*(foreign_imports(ast.walk(tree)) for tree in TREES.values()))
    assert declared(PROJECT["dependencies"]) | OPTIONAL == imported


def test_the_core_depends_on_little():
    assert declared(PROJECT["dependencies"]) == CORE


def test_only_the_parts_of_real_sites_import_an_extra_when_they_are_imported():
    """They, or their packages, name the extra in their first lines; all others import extras when they are used."""
    for path, tree in TREES.items():
        extras = foreign_imports(at_import(tree)) - CORE
        assert extras <= EXTRAS["flower"], path
        package = TREES[f"{path.rpartition('/')[0]}/__init__.py"]
        said = " ".join(ast.get_docstring(place) or "" for place in (tree, package))
        assert not extras or "flower" in said.lower(), path


WITHOUT_EXTRAS = """
import importlib.util
import sys
from importlib.abc import MetaPathFinder


looked_for = []


class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        looked_for.append(name)
        if name.split(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.split(".")[0])


def find_spec(name, package=None, find=importlib.util.find_spec):
    return None if name.split(".")[0] in {modules!r} else find(name, package)


sys.meta_path.insert(0, Absent())
importlib.util.find_spec = find_spec  # which looks for a module without importing it
from fedstrata.cli import main

assert not {{"numpy", "torch"}} & set(sys.modules)
short = ["run", "--rounds", "1", "--epochs", "1", "--quiet"]
for command in (["--help"], ["methods"], ["models"], ["layers"], [*short, "--no-report"], short):
    code = main(command)
    assert code == 0, (command, code)
    slow = {{"torch._dynamo", "torch._inductor", "sympy", "sklearn", "scipy"}} & set(sys.modules)
    assert not slow, (command, slow)
    assert command == short or "pandas" not in looked_for, command
"""
"""Nothing is imported either that takes long and is not needed: PyTorch's compiler, or pandas, which PyArrow looks for
(and gets for a report).
"""


def test_the_command_line_works_without_any_extra(tmp_path):
    modules = {name.replace("-", "_") for name in OPTIONAL} | {"vl_convert"}
    program = WITHOUT_EXTRAS.format(modules=sorted(modules))
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
