"""Components of other people: imported files, what a run keeps of them, sites that trust nobody, installed packages."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
from forking import Forked, finished

import fedstrata
from fedstrata.comparing import OtherExperimentError, PlannedRun
from fedstrata.data import datasets
from fedstrata.deployment.protocol import OK, REFUSED, Request
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment, read_pinned
from fedstrata.methods import methods
from fedstrata.models import models
from fedstrata.plugins import IMPORTS_FOLDER, import_file, load_imports, require_imports
from fedstrata.report import write_report
from fedstrata.runs.folder import RunFolder
from fedstrata.spec import Registry, Spec

pytestmark = pytest.mark.usefixtures("fresh_imports")

ROOT = Path(__file__).parents[1]
METHOD = '''
from dataclasses import dataclass
from typing import ClassVar
from fedstrata.methods import Facts, Part, methods
from fedstrata.spec import parameter

@methods.register("{name}")
@dataclass(frozen=True)
class {cls}(Part):
    """{doc}"""
    facts: ClassVar[Facts] = Facts("own", "nobody")
    mu: float = parameter(0.5, "How much.", low=0)

    def loss(self, clients, step, loss):
        return loss + self.mu * sum((step.parameters[name] - step.received[name]).square().flatten(1).sum(1)
                             for name in step.parameters if name in clients.shared)
'''
SMALL = {"model": "mlp(hidden=8)", "clients": 3, "epochs": 1, "engine": "stacked", "partition": "iid"}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"}
LONGEST = 240


def write(path: Path, name: str = "mine", doc: str = "A method of my own.", cls: str = "Mine", more: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(METHOD.format(name=name, doc=doc, cls=cls) + more)
    return path


def fedstrata_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fedstrata", *arguments]


def pin(path: Path) -> str:
    return f"{path.name}@sha256:{sha256(path.read_bytes()).hexdigest()}"


# Importing a file -----------------------------------------------------------------------------------------------------


def test_an_imported_file_registers_its_components(tmp_path):
    file = import_file(write(tmp_path / "my_methods.py"))
    assert file.pinned == pin(tmp_path / "my_methods.py")
    assert str(methods.make("mine:0.1")) == "mine(mu=0.1)"
    assert methods.describe("mine")["origin"] == "my_methods.py"
    assert methods.describe("fedavg")["origin"] is None
    assert "mine" in methods.names()


def test_the_same_content_again_is_fine_wherever_it_lies(tmp_path):
    first = import_file(write(tmp_path / "my_methods.py"))
    cls = methods.get("mine")
    assert import_file(tmp_path / "my_methods.py") is first
    assert import_file(write(tmp_path / "copy" / "my_methods.py")) is first
    assert methods.get("mine") is cls
    import_file(write(tmp_path / "other_name.py"))
    assert methods.get("mine") is not cls


def test_a_file_that_python_has_imported_can_be_imported_again(tmp_path, monkeypatch):
    write(tmp_path / "as_a_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("as_a_module")
    try:
        assert methods.get("mine") is module.Mine
        assert methods.describe("mine")["origin"] == "as_a_module.py"
        import_file(tmp_path / "as_a_module.py")
        assert methods.get("mine") is not module.Mine
    finally:
        del sys.modules["as_a_module"]


def test_what_is_typed_in_again_takes_the_place_of_what_was_there_with_a_word(monkeypatch):
    session = types.ModuleType("a_session_without_a_file")
    monkeypatch.setitem(sys.modules, session.__name__, session)
    exec(METHOD.format(name="typed", doc="First.", cls="Typed"), session.__dict__)
    for doc, cls in (("Second.", "Typed"), ("Third.", "Renamed")):
        with pytest.warns(FedStrataWarning, match="The method 'typed' is the one that was just defined; it replaces"):
            exec(METHOD.format(name="typed", doc=doc, cls=cls), session.__dict__)
        assert methods.describe("typed")["summary"] == doc
        assert methods.describe("typed")["origin"] == session.__name__
    methods.put("typed", None)


def test_a_cell_of_a_notebook_replaces_only_what_another_cell_brought(monkeypatch, tmp_path):
    import_file(write(tmp_path / "a.py"))
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    cell = {"__name__": "__main__"}
    exec(METHOD.format(name="in-a-cell", doc="First.", cls="InACell"), cell)
    with pytest.warns(FedStrataWarning, match="it replaces the one before"):
        exec(METHOD.format(name="in-a-cell", doc="Second.", cls="InACell"), cell)
    methods.put("in-a-cell", None)
    for name, whose in (("mine", r", from a\.py"), ("fedavg", "")):
        with pytest.raises(FedStrataError, match=f"There is already a method '{name}'{whose}; choose another name"):
            exec(METHOD.format(name=name, doc="Mine.", cls="Mine"), cell)


def test_another_version_takes_the_place_of_the_one_before(tmp_path):
    first = import_file(write(tmp_path / "my_methods.py", more=METHOD.format(name="old", doc="Old.", cls="Old")))
    second = import_file(write(tmp_path / "my_methods.py", doc="Better."))
    assert first.pinned != second.pinned
    assert methods.describe("mine")["summary"] == "Better."
    assert "old" not in methods.names()
    with pytest.raises(FedStrataError, match="another version"):
        require_imports([first.pinned])
    assert require_imports([second.pinned]) == {"my_methods.py": second}


def test_a_name_that_another_file_has_is_refused_and_both_are_named(tmp_path):
    import_file(write(tmp_path / "a.py"))
    mine = methods.get("mine")
    with pytest.raises(
        FedStrataError,
        match=r"b\.py' cannot be imported: line 7: There is already a method 'mine', from a\.py; choose another name "
        r"in b\.py\.",
    ):
        import_file(write(tmp_path / "b.py", doc="Another.", more="x = 1"))
    assert methods.get("mine") is mine
    with pytest.raises(FedStrataError, match=r"already a method 'fedavg'; choose another name in c\.py"):
        import_file(write(tmp_path / "c.py", name="fedavg"))
    with pytest.raises(FedStrataError, match=r"already a method 'twice', from d\.py; choose another name in d\.py"):
        import_file(write(tmp_path / "d.py", name="twice", more=METHOD.format(name="twice", doc="Again.", cls="Again")))
    assert "twice" not in methods.names()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = 1\nraise ValueError('no luck')", "line 2: ValueError: no luck."),
        ("def f():\n    g()\n\ndef g():\n    1 / 0\n\nf()", "line 5: ZeroDivisionError: division by zero."),
        ("x = 1\nx +* 2\n", "line 2: SyntaxError: invalid syntax."),
        ("import nowhere_to_be_found", "line 1: ModuleNotFoundError: No module named 'nowhere_to_be_found'."),
        ("import sys\nsys.exit(3)", "line 2: SystemExit: 3."),
        ("x = '\0'", "null bytes"),
        (b"x = '\xff'", "SyntaxError"),
        ("x = 1", "registers nothing; put @methods.register('a-name') before the class"),
        ("", "registers nothing"),
    ],
)
def test_a_file_that_fails_is_told_in_a_sentence_with_its_line(tmp_path, content, said):
    path = tmp_path / "bad.py"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    modules = set(sys.modules)
    with pytest.raises(FedStrataError) as caught:
        import_file(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"'{path}' ")
    assert str(caught.value).endswith(".")
    assert not {name for name in set(sys.modules) - modules if name.startswith("fedstrata_import")}


def test_of_a_file_that_fails_half_way_nothing_stays(tmp_path):
    before = import_file(write(tmp_path / "my_methods.py"))
    with pytest.raises(FedStrataError, match="line 17: RuntimeError"):
        import_file(write(tmp_path / "my_methods.py", doc="Changed.", more="raise RuntimeError"))
    assert methods.describe("mine")["summary"] == "A method of my own."
    assert require_imports([before.pinned])
    with pytest.raises(FedStrataError, match="RuntimeError"):
        import_file(write(tmp_path / "more.py", name="half", more="raise RuntimeError"))
    assert "half" not in methods.names()


def test_a_path_without_a_file_is_told(tmp_path):
    with pytest.raises(FedStrataError, match=r"There is no file '.*absent\.py' to import"):
        import_file(tmp_path / "absent.py")
    with pytest.raises(FedStrataError, match="cannot be imported: is a directory"):
        import_file(tmp_path)


def test_a_file_stands_alone(tmp_path):
    write(tmp_path / "helpers.py")
    path = write(tmp_path / "my_methods.py", more="import helpers")
    with pytest.raises(FedStrataError, match=r"stands alone, so that a run can keep it: put what it needs of helpers"):
        import_file(path)


def test_what_a_file_prints_is_no_result(tmp_path, capsys):
    import_file(write(tmp_path / "my_methods.py", more="print('hello')"))
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("@methods.register('odd')\nclass Odd: pass", "not derived from fedstrata.methods.Part"),
        ("@methods.register('odd')\ndef odd(): pass", "not derived from fedstrata.methods.Part"),
        (
            "@methods.register('odd')\nclass Odd(Part):\n    mu: float = parameter(1.0, 'x')",
            "without @dataclass(frozen=True)",
        ),
        ("@methods.register('odd')\n@dataclass(frozen=True)\nclass Odd(Part): pass", "does not define 'facts'"),
        ("@models.register('odd')\n@dataclass(frozen=True)\nclass Odd(ModelSpec): pass", "does not define 'build'"),
        (
            "@datasets.register('odd')\n@dataclass(frozen=True)\nclass Odd(DatasetSource):\n    size: int\n"
            "    def load(self, root=None): ...",
            "its parameter 'size' has no default",
        ),
        (
            "@partitions.register('odd')\n@dataclass(frozen=True)\nclass Odd(Partitioner):\n"
            "    def split(self, dataset, clients): ...",
            "does not define 'seed'",
        ),
    ],
)
def test_a_class_that_could_not_work_is_refused_at_once(tmp_path, content, said):
    path = tmp_path / "odd.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom fedstrata.data import *\nfrom fedstrata.methods import *\n"
        "from fedstrata.models import *\nfrom fedstrata.spec import parameter\n" + content
    )
    with pytest.raises(FedStrataError) as caught:
        import_file(path)
    assert said in str(caught.value)
    assert all("odd" not in registry.names() for registry in (methods, models, datasets))


# What experiments name ------------------------------------------------------------------------------------------------


def test_an_experiment_names_files_by_path_and_then_by_content(tmp_path):
    path = write(tmp_path / "below" / "my_methods.py")
    toml = tmp_path / "experiment.toml"
    toml.write_text('imports = ["below/my_methods.py"]\nmethod = "mine"\n')
    experiment = Experiment.read(toml)
    assert experiment.imports == (str(path),)
    loaded = load_imports(experiment)
    assert loaded.imports == (pin(path),)
    assert read_pinned(loaded.imports[0]) == ("my_methods.py", sha256(path.read_bytes()).hexdigest())
    toml.write_text(loaded.to_toml())
    assert Experiment.read(toml) == loaded
    assert load_imports(loaded) == loaded
    assert "imports" not in Experiment().to_toml()
    assert Experiment.from_mapping(json.loads(json.dumps(loaded.to_mapping()))) == loaded


@pytest.mark.parametrize("given", [3, {"a": 1}, [1], b"a.py", None])
def test_imports_that_are_no_files_are_refused(given):
    with pytest.raises(FedStrataError, match="'imports'"):
        Experiment(imports=given)


def test_one_file_may_be_given_without_a_list():
    assert Experiment(imports="my.py").imports == ("my.py",)
    assert Experiment(imports=[Path("my.py"), "a/b.py"]).imports == ("my.py", "a/b.py")


def test_two_files_of_one_name_are_refused(tmp_path):
    files = [str(write(tmp_path / folder / "my.py", name=folder)) for folder in ("a", "b")]
    with pytest.raises(FedStrataError, match=r"Two files to import are called 'my\.py'"):
        load_imports(Experiment(imports=files))


def test_a_file_that_is_named_by_its_content_must_be_found_with_that_content(tmp_path):
    path = write(tmp_path / "my.py")
    experiment = Experiment(imports=[pin(path)])
    write(tmp_path / "my.py", doc="Changed.")
    with pytest.raises(FedStrataError, match=r"my\.py' has changed"):
        load_imports(experiment, tmp_path)
    with pytest.raises(FedStrataError, match=r"give it with --import"):
        load_imports(experiment, tmp_path / "elsewhere")
    write(tmp_path / "kept" / "my.py")
    assert load_imports(experiment, tmp_path, tmp_path / "kept") == experiment


def test_what_is_not_imported_cannot_be_run(tmp_path):
    path = write(tmp_path / "my.py")
    for imports in ([str(path)], [pin(path)]):
        with pytest.raises(FedStrataError, match=r"'.*my\.py'.* not imported here; import it first"):
            fedstrata.runs.preparing.prepare(Experiment(method="mine", imports=imports))
    assert "mine" not in methods.names()


# What a run keeps -----------------------------------------------------------------------------------------------------


def test_a_run_keeps_the_files_that_it_imported(tmp_path):
    path = write(tmp_path / "my_methods.py")
    for out in ("new", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        fedstrata.run(method="mine", imports=[path], out=tmp_path / out, rounds=1, **SMALL)
        folder = RunFolder.open(tmp_path / out)
        assert folder.experiment.imports == (pin(path),)
        assert (tmp_path / out / IMPORTS_FOLDER / "my_methods.py").read_bytes() == path.read_bytes()
        write_report([folder.path], tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert pin(path) in page
        assert "my_methods.py</code> from the folder <code>imports</code> of a run" in page


def test_runs_with_another_version_are_told_apart(tmp_path):
    path = write(tmp_path / "my_methods.py")
    fedstrata.run(method="mine", imports=[path], out=tmp_path / "a", rounds=1, **SMALL)
    write(path, doc="Changed.")
    fedstrata.run(method="mine", imports=[path], out=tmp_path / "b", rounds=1, **SMALL)
    a, b = (RunFolder.open(tmp_path / name).experiment for name in "ab")
    assert {a.imports, b.imports} == {(pin(tmp_path / name / IMPORTS_FOLDER / "my_methods.py"),) for name in "ab"}
    assert PlannedRun.find(a, tmp_path / "a").state == "finished"
    with pytest.raises(OtherExperimentError, match=rf"imports is {b.imports[0]} there, not {a.imports[0]}"):
        PlannedRun.find(a, tmp_path / "b")
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html")
    assert f"--import {tmp_path}/a/imports/my_methods.py" in (tmp_path / "report.html").read_text()


RUN = (
    *("--method", "mine", "--model", "mlp(hidden=8)", "--clients", "4", "--epochs", "1", "--engine", "stacked"),
    *("--rounds", "40", "--checkpoint-every", "1", "--no-report", "--quiet"),
)


def test_a_run_that_was_killed_goes_on_from_its_folder_alone(tmp_path):
    path = write(tmp_path / "my_methods.py", more=f"open({str(tmp_path / 'executed')!r}, 'a').write('x')\n")
    out = tmp_path / "run"
    process = Forked(tmp_path / "run.log", "run", "--import", str(path), *RUN, "--out", str(out))
    began = time.monotonic()
    while not list(out.glob("checkpoints/round-*")) and process.poll() is None and time.monotonic() - began < LONGEST:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(LONGEST) == -signal.SIGKILL
    path.unlink()
    moved = tmp_path / "moved"
    out.rename(moved)
    kept = moved / IMPORTS_FOLDER / "my_methods.py"
    original = kept.read_bytes()

    executed = (tmp_path / "executed").read_text()
    write_report([moved], tmp_path / "report.html")
    kept.write_bytes(original + b"# changed")
    with pytest.raises(FedStrataError, match=r"my_methods\.py' has changed: its SHA-256 is"):
        fedstrata.resume(moved)
    kept.unlink()
    with pytest.raises(FedStrataError, match=r"needs the file 'my_methods\.py'"):
        fedstrata.resume(moved)
    assert (tmp_path / "executed").read_text() == executed, "a report runs nothing, and what has changed is not run"

    kept.write_bytes(original)
    resumed = finished("resume", str(moved), "--no-report", "--json", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["rounds"] == 40


# Sites ----------------------------------------------------------------------------------------------------------------

SITES = Experiment(
    method="mine",
    rounds=2,
    epochs=1,
    batch_size=16,
    partition="dirichlet(alpha=0.5, samples=60)",
    model="mlp(hidden=8)",
)


def greet(folder: Path, imports: list[str]) -> tuple[str, str]:
    experiment = {**SITES.to_mapping(), "imports": imports, "clients": 2}
    facts = {"experiment": experiment, "number": 0, "sites": 2, "session": "one", "committed": 0}
    answer = Site(folder, SiteData()).answer(Request("hello", "run", facts=facts))
    return answer.status, answer.reason


def test_a_site_runs_only_files_that_its_own_operator_gave(tmp_path):
    executed = tmp_path / "executed"
    path = write(tmp_path / "my_methods.py", more=f"open({str(executed)!r}, 'w')\n")
    status, reason = greet(tmp_path / "state", [pin(path)])
    assert status == REFUSED
    assert f"'my_methods.py' (SHA-256 {pin(path).partition(':')[2]}), which is not imported here" in reason
    assert "start the client with --import my_methods.py" in reason
    for name in (str(path), f"../{path.name}", f"{tmp_path}/{pin(path)}", "", ".."):
        status, reason = greet(tmp_path / "state", [name])
        assert status == REFUSED, name
        assert "--import" in reason
    assert not executed.exists(), "nothing that the server names was run"
    import_file(path)
    assert greet(tmp_path / "state", [pin(path)]) == (OK, "no reason was given")
    status, reason = greet(tmp_path / "state", [str(path)])
    assert status == REFUSED, "a mere path says nothing about the content"
    status, reason = greet(tmp_path / "state", [f"my_methods.py@sha256:{64 * '0'}"])
    assert status == REFUSED
    assert "another version" in reason


def test_a_server_must_have_imported_what_it_names(tmp_path):
    path = write(tmp_path / "my_methods.py")
    experiment = SITES.with_changes({"imports": [str(path)]})
    with pytest.raises(FedStrataError, match="import it first"):
        Deployment(experiment, ["a", "b"], tmp_path / "run").check()
    described = Deployment(load_imports(experiment), ["a", "b"], tmp_path / "run").describe()
    assert described["imports"] == [f"{pin(path)}, which every site must import too"]


def test_a_flower_app_imports_what_its_author_gave(tmp_path):
    pytest.importorskip("flwr")
    from fedstrata.deployment.flower import client_app

    client_app(imports=[write(tmp_path / "my_methods.py")])
    assert "mine" in methods.names()
    with pytest.raises(FedStrataError, match=r"no file 'absent\.py'"):
        client_app(imports=["absent.py"])


@pytest.mark.slow
def test_one_command_deploys_an_imported_method(tmp_path):
    pytest.importorskip("flwr")
    path = write(tmp_path / "my_methods.py")
    toml = tmp_path / "experiment.toml"
    toml.write_text(SITES.with_changes({"imports": ["my_methods.py"]}).to_toml())
    out = tmp_path / "run"
    asked = fedstrata_command("deploy", "--local", "2", str(toml), "--out", str(out), "--no-report", "--json")
    done = subprocess.run(asked, capture_output=True, text=True, env=ENVIRONMENT, timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "mine"
    assert (out / IMPORTS_FOLDER / "my_methods.py").read_bytes() == path.read_bytes()
    imported = load_imports(SITES.with_changes({"imports": [str(path)], "engine": "loop", "clients": 2}))
    simulated = fedstrata.run(imported)
    for name, tensor in RunFolder.open(out).model().items():
        assert tensor.allclose(simulated.model[name], atol=1e-6), name


# Packages -------------------------------------------------------------------------------------------------------------


def install(folder: Path, package: str, entry_points: str, **modules: str) -> None:
    """Put a package where an installer would, with the least that says what it is."""
    info = folder / f"{package.replace('-', '_')}-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(entry_points)
    for name, content in modules.items():
        (folder / f"{name}.py").write_text(content)


MODEL = """
from dataclasses import dataclass
from torch import nn
from fedstrata.models import ModelSpec

print("this is no result")

@dataclass(frozen=True)
class Flat(ModelSpec):
    '''One layer.'''
    def build(self, input_shape, classes):
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes)) if not input_shape else nn.Sequential(
            nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture
def packages(tmp_path):
    """Two packages, one of them broken."""
    site = tmp_path / "site"
    install(
        site,
        "nice-methods",
        "[fedstrata.methods]\nmine = nice_methods:Mine\n\n[fedstrata.models]\nflat = nice_models:Flat\n",
        nice_methods=METHOD.format(name="mine", doc="From a package.", cls="Mine"),
        nice_models=MODEL,
    )
    install(
        site,
        "broken-methods",
        "[fedstrata.methods]\nbroken = broken_methods:Broken\nabsent = nowhere_at_all\nfedavg = stolen_name\n",
        broken_methods=METHOD.format(name="broken", doc="Never.", cls="Broken") + "raise OSError('no disk')",
        stolen_name=METHOD.format(name="fedavg", doc="Never.", cls="Stolen"),
    )
    return partial(finished, folder=tmp_path, path=[site])


def test_installed_packages_offer_components(packages, tmp_path):
    listed = packages("methods", "--json")
    origins = {entry["name"]: entry["origin"] for entry in json.loads(listed.stdout)}
    assert {name: origin for name, origin in origins.items() if origin} == {"mine": "package nice-methods"}
    warnings = [line for line in listed.stderr.splitlines() if line.startswith("Warning: ")]
    assert warnings == [
        "Warning: The method 'broken' of the package 'broken-methods' cannot be used: OSError: no disk.",
        "Warning: The method 'absent' of the package 'broken-methods' cannot be used: ModuleNotFoundError: No module "
        "named 'nowhere_at_all'.",
        "Warning: The method 'fedavg' of the package 'broken-methods' cannot be used: There is already a method "
        "'fedavg'; choose another name in package broken-methods.",
    ]
    assert "(from package nice-methods)" in " ".join(packages("methods").stdout.split())
    arguments = [f"--{key}={value}" for key, value in {**SMALL, "method": "mine", "model": "flat"}.items()]
    run = packages("run", *arguments, "--rounds", "1", "--out", "run", "--no-report", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["method"] == "mine"
    assert RunFolder.open(tmp_path / "run").environment()["packages"] == {"nice-methods": "1.5"}


def test_packages_are_left_alone_where_nobody_asks_for_them(packages, tmp_path):
    arguments = [f"--{key}={value}" for key, value in SMALL.items()]
    run = packages("run", *arguments, "--rounds", "1", "--out", "run", "--no-report", "--quiet")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert "packages" not in RunFolder.open(tmp_path / "run").environment()


def test_a_registry_looks_for_packages_once_and_when_it_must(tmp_path, monkeypatch):
    install(
        tmp_path,
        "tool-box",
        "[fedstrata.tools]\nhammer = tool_box:Hammer\nbox = tool_box\nodd = tool_box:number\n",
        tool_box="from dataclasses import dataclass\nfrom fedstrata.spec import Spec\n"
        "@dataclass(frozen=True)\nclass Hammer(Spec):\n    '''Hits.'''\nnumber = 3\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    tools: Registry[Spec] = Registry("tool")
    assert tools.registered("hammer") is None
    with pytest.warns(FedStrataWarning, match="'odd' of the package 'tool-box' cannot be used"):
        assert tools.make("hammer").name == "hammer"
    assert tools.names() == ["hammer"]
    shutil.rmtree(tmp_path / "tool_box-1.5.dist-info")
    with pytest.raises(FedStrataError, match="no tool 'saw'"):
        tools.get("saw")
