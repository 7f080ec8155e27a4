"""Who imports whom: what knows Flower, what the server may know of a site, and which packages the extra must bring."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fedstrata"
DEPLOYMENT = PACKAGE / "deployment"
DOCUMENTED = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
FENCE = "flower/internals.py"


def imports(path: Path) -> Iterator[str]:
    """List the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield node.module


def named(path: Path) -> str:
    return path.relative_to(DEPLOYMENT).as_posix()


@pytest.mark.parametrize("package", ["", "secure", "flower"])
def test_the_map_of_a_package_names_its_files(package):
    folder = DEPLOYMENT / package
    there = {path.name for path in folder.glob("*.py")} | {f"{path.parent.name}/" for path in folder.glob("*/*.py")}
    described = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert set(re.findall(r"^    (\w+(?:\.py|/)) ", described, re.MULTILINE)) == there - {"__init__.py"}


def test_nothing_but_deployment_and_its_commands_knows_deployment():
    knowing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if DEPLOYMENT not in path.parents and any(name.startswith("fedstrata.deployment") for name in imports(path))
    }
    assert knowing == {
        f"cli/{name}.py" for name in ("auditing", "connections", "deployment", "keys", "passphrases", "site")
    }


def test_flower_is_known_in_one_folder_and_what_it_does_not_document_in_one_file():
    for path in PACKAGE.rglob("*.py"):
        used = {name for name in imports(path) if name.partition(".")[0] == "flwr"}
        assert not used or path.parent == DEPLOYMENT / "flower", path
        assert used <= DOCUMENTED or named(path) == FENCE, path


def undocumented() -> dict[str, str]:
    """List what the fence imports that Flower does not document, by the names under which it is used."""
    tree = ast.parse((DEPLOYMENT / FENCE).read_text())
    return {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr") and node.module not in DOCUMENTED
        for alias in node.names
    }


def test_every_undocumented_use_of_flower_is_named_with_its_purpose():
    pytest.importorskip("flwr")
    from fedstrata.deployment.flower import internals

    assert internals.USES.keys() == undocumented().keys()
    assert internals.USED_PARTS.keys() <= internals.USES.keys()
    for name, parts in internals.USED_PARTS.items():
        for part in parts:
            assert hasattr(getattr(internals, name), part), f"Flower has no {name}.{part} any more"


def test_what_is_looked_at_inside_of_flower_is_still_there():
    pytest.importorskip("flwr")
    from fedstrata.deployment.flower import SuperLink, internals

    state = SuperLink("127.0.0.1", 0, [], None)._state
    for name in internals.LINK_STATE_HOLDS:
        assert hasattr(state, name), f"Flower's link state has no {name} any more"


def test_the_versions_of_flower_that_were_run_are_told():
    pytest.importorskip("flwr")
    from fedstrata.deployment.flower import internals

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [asked] = [text for text in project["optional-dependencies"]["flower"] if text.startswith("flwr")]
    told = (ROOT / "docs" / "deployment.md").read_text().partition("## Which versions of Flower were run")[2]
    assert f"`{asked}`" in told
    assert internals.READ_FROM in told


def test_the_server_does_not_import_the_site():
    sites = {"fedstrata.deployment.site", "fedstrata.deployment.store", "fedstrata.deployment.secure.site"}
    for name in ("server", "engine", "federation", "secure/server", "secure/rounds", "flower/grid", "flower/serving"):
        assert not sites & set(imports(DEPLOYMENT / f"{name}.py")), name


def test_the_extra_brings_every_package_that_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["flower"]]
    brought = {re.split(r"[<>=\[]", text)[0] for text in required} | {"fedstrata"} | set(sys.stdlib_module_names)
    for path in DEPLOYMENT.rglob("*.py"):
        assert {name.partition(".")[0] for name in imports(path)} <= brought, path


def test_without_flower_the_extra_is_named_when_an_app_is_imported():
    code = "import sys; sys.modules['flwr'] = None; from fedstrata.deployment.flower import client_app"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.strip().endswith("pip install 'fedstrata[flower]'")


def test_all_public_names_are_there():
    pytest.importorskip("flwr")
    from fedstrata.deployment import flower

    for name in flower.__all__:
        assert getattr(flower, name) is not None
        assert name in dir(flower)
    with pytest.raises(AttributeError, match="nonsense"):
        flower.nonsense  # noqa: B018
