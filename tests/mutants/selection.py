"""Which tests are asked about the mutants of a file: those of its name; for what methods share, those of its users."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT / "tests" / "methods" / "test_contract.py"
PLAIN = ROOT / "tests" / "plain"
FOLDERS = ("fedstrata/methods", "fedstrata/functional")

ELSEWHERE = {
    "fedstrata/methods/adadecay.py": ("server_decay",),
    "fedstrata/methods/awd.py": ("server_decay",),
    "fedstrata/methods/central_dp.py": ("privacy",),
    "fedstrata/methods/fedadagrad.py": ("server_optimiser",),
    "fedstrata/methods/fedadam.py": ("server_optimiser",),
    "fedstrata/methods/fedavgm.py": ("server_optimiser",),
    "fedstrata/methods/fedyogi.py": ("server_optimiser",),
    "fedstrata/methods/flash_jmwst.py": ("flash",),
    "fedstrata/methods/flash_spdst.py": ("flash",),
    "fedstrata/methods/local_dp.py": ("privacy",),
    "fedstrata/methods/mechanisms/private_updates.py": ("privacy",),
    "fedstrata/methods/attack.py": ("robust",),
    "fedstrata/methods/fltrust.py": ("robust",),
    "fedstrata/methods/krum.py": ("robust",),
    "fedstrata/methods/median.py": ("robust",),
    "fedstrata/methods/multi_krum.py": ("robust",),
    "fedstrata/methods/norm_bound.py": ("robust",),
    "fedstrata/methods/rfa.py": ("robust",),
    "fedstrata/methods/trimmed_mean.py": ("robust",),
    "fedstrata/methods/mechanisms/krum_choice.py": ("robust",),
    "fedstrata/methods/mechanisms/robust_merging.py": ("robust",),
    "fedstrata/functional/_entries.py": ("entries",),
    "fedstrata/functional/l_dawa.py": ("functional_ldawa",),
    "fedstrata/functional/privacy.py": ("gaussian_account", "privacy"),
}
"""Files whose tests are not called like them."""

OF_EVERY_PART = ("parameters", "declarations")
"""The tests of what parts, and the mechanisms that they are made of, say of themselves."""

OF_THE_CONTRACT = ("views", "composition", "declarations", "compatibility", "checks")
"""The tests of what every method is made of."""


@dataclass(frozen=True)
class Suite:
    """What is asked about a file."""

    files: tuple[Path, ...]
    """Files of tests; a file of the package stands for the examples in its docstrings."""
    methods: tuple[str, ...]
    """The methods whose part of the contract suite is asked too."""

    def content(self) -> bytes:
        """Read all of it, to notice when something changes."""
        return b"".join(path.read_bytes() for path in (*self.files, *([CONTRACT] if self.methods else [])))


def sources() -> dict[str, Path]:
    """Name all files that get mutants, such as ``fedstrata/methods/lips.py``."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): path for path in paths if path.name != "__init__.py"}


def suite_of(name: str) -> Suite:
    """Choose the tests of a file, its own first."""
    path = ROOT / name
    if path.parent.name == "contract":
        return Suite(_existing(OF_THE_CONTRACT), ())
    if path.parent.name == "methods":
        method = path.stem.replace("_", "-")
        plain = (one for one in sorted(PLAIN.glob("test_*.py")) if re.search(rf"\b{method}\b", one.read_text()))
        made_of = [test for mechanism in _mechanisms(path) for test in _own(mechanism)]
        files = (*_existing(OF_EVERY_PART), *_own(name), *plain, *_existing(("compatibility",)), *made_of)
        return Suite(tuple(dict.fromkeys(files)), (method,))
    own = _own(name)
    if path.parent.name == "mechanisms" or path.name.startswith("_") or not own:
        own = (*own, *(test for user in _users(path) for test in _own(user)))
    declared = _existing(OF_EVERY_PART) if path.parent.name == "mechanisms" else ()
    examples = [path] if ">>> " in path.read_text() else []
    return Suite(tuple(dict.fromkeys([*examples, *declared, *own])), ())


def _own(name: str) -> tuple[Path, ...]:
    stem = Path(name).stem
    return _existing(ELSEWHERE.get(name, (f"functional_{stem}" if "/functional/" in name else stem,)))


def _existing(stems: tuple[str, ...]) -> tuple[Path, ...]:
    paths = (ROOT / "tests" / folder / f"test_{stem}.py" for stem in stems for folder in ("methods", "functional"))
    return tuple(path for path in paths if path.exists())


def _mechanisms(path: Path) -> list[str]:
    """Name the mechanisms that a method is made of."""
    modules = re.findall(r"from (fedstrata\.methods\.mechanisms\.\w+) import", path.read_text())
    return [f"{module.replace('.', '/')}.py" for module in modules]


def _users(path: Path) -> list[str]:
    """Name the files that import something which a file defines."""
    defined = {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    return [name for name, other in sources().items() if other != path and defined & _imported(other)]


def _imported(path: Path) -> set[str]:
    froms = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    ours = (node for node in froms if (node.module or "").startswith(FOLDERS_AS_MODULES))
    return {alias.name for node in ours for alias in node.names}


FOLDERS_AS_MODULES = tuple(folder.replace("/", ".") for folder in FOLDERS)
