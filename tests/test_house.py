"""The house is as the documents draw it."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedstrata"


def test_the_picture_of_imports_is_what_is_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if "containers" not in contract and "layers" in contract]
    checked = [line.replace("fedstrata.", "") for line in layers]
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    [drawn] = [block for block in blocks if block.startswith("cli\n")]
    assert [re.split(r"\s{2,}", line)[0] for line in drawn.splitlines()] == checked


def test_every_module_has_its_place_in_the_picture():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    placed = set(re.findall(r"fedstrata\.(\w+)", str(contracts)))
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {module for module in modules if not module.startswith("_")} == placed


def test_the_map_of_files_names_what_exists():
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    [drawn] = [block for block in blocks if block.startswith("fedstrata/\n")]
    named = set(re.findall(r"\b(\w+\.py)\b", drawn)) | {f"{folder}/" for folder in re.findall(r"\b(\w+)/", drawn)}
    existing = {path.name for path in PACKAGE.rglob("*.py")} | {f"{path.name}/" for path in PACKAGE.rglob("*")}
    assert named <= existing | {"fedstrata/"}
    top = {path.name for path in PACKAGE.glob("[a-z]*.py")}
    assert top <= named


def test_mechanisms_know_no_method():
    """A mechanism is what several methods share; one that needs a method is a part of that method."""
    methods = {path.stem for path in (PACKAGE / "methods").glob("[a-z]*.py")}
    for path in (PACKAGE / "methods" / "mechanisms").glob("*.py"):
        used = set(re.findall(r"from fedstrata\.methods\.(\w+)[. ]", path.read_text()))
        assert not used & methods, path.name


def test_what_docstrings_refer_to_exists():
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(r":\w+:`~?(fedstrata(?:\.\w+)+)`", path.read_text()):
            assert _exists(name), f"{path.relative_to(ROOT)} refers to {name}"


def _exists(name: str) -> bool:
    """Tell whether a name is a module, or stands in one, in a class of one, or among a class's fields."""
    parts = name.split(".")
    depth = next(depth for depth in range(len(parts), 0, -1) if _is_module(".".join(parts[:depth])))
    found: object = importlib.import_module(".".join(parts[:depth])) if depth < len(parts) else None
    for part in parts[depth:]:
        if not hasattr(found, part):
            return part in getattr(found, "__dataclass_fields__", ())
        found = getattr(found, part)
    return True


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
