"""What the documentation shows works as it is shown, and what it is made of says what the code says."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedstrata.cli import app, main
from fedstrata.diagnostics import diagnostics
from fedstrata.methods import Decision, Matter, Part, methods

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
RUN = (
    "diagnostics.md",
    "index.md",
    "losses-and-metrics.md",
    "papers.md",
    "robust.md",
    "use-the-model.md",
    "while-it-runs.md",
    "write-a-method.md",
    "your-data-and-model.md",
)
"""The pages whose Python runs, block after block, in one program."""
WITH_LONG_TABLES = ("papers.md", "security.md", "reproduction.md")
LARGE = {
    "index.md": ("fedstrata compare", "fedstrata report", "fedstrata diff", "fedstrata picture"),
    "papers.md": ("fedstrata paper lips",),
    "use-the-model.md": ("fedstrata run",),
    "while-it-runs.md": ("fedstrata watch", "fedstrata report", "fedstrata run --log"),
    "write-a-method.md": ("fedstrata deploy",),  # as test_plugins.py does, among the slow tests
    "your-data-and-model.md": ('fedstrata run --data "image_folder',),
}
"""What only runs with data, runs or packages that are not there, or takes too long for a test."""
SMALLER = {
    "run": ("--model", "mlp", "--clients", "4", "--epochs", "1", "--no-report", "--quiet"),
    "compare": ("--model", "mlp", "--clients", "4", "--rounds", "1", "--seeds", "1", "--no-report", "--quiet"),
    "deploy": ("--model", "mlp", "--epochs", "1", "--no-report", "--quiet"),
}
"""Options with which commands are as they are shown, but quick."""


@dataclass(frozen=True)
class Block:
    """A block of code on a page, and what it should print, where the page says so."""

    language: str
    file: str
    text: str
    prints: str | None

    @property
    def commands(self) -> list[str]:
        """The commands of a block for a shell, each in one line and without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.partition(" #")[0].strip() for line in lines if line.startswith("fedstrata ")]


def blocks(page: str) -> list[Block]:
    found = re.findall(r'(?ms)^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', PAGES[page])
    after = [*found, ("", "", "")][1:]
    return [
        Block(language, file, text, following[2] if language == "python" and following[0] == "text" else None)
        for (language, file, text), following in zip(found, after, strict=True)
    ]


@pytest.mark.usefixtures("fresh_methods")
@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_from_its_first_block_to_its_last(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    program: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page)):
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.text, f"{page}, block {number}", "exec", dont_inherit=True), program)
            if block.prints is not None:
                assert printed.getvalue().split() == block.prints.split()
        elif block.language == "":
            for command in block.commands:
                if not command.startswith(LARGE.get(page, ())):
                    arguments = shlex.split(command)[1:]
                    assert main([*arguments, *SMALLER.get(arguments[0], ())]) == 0, command


def test_the_tutorial_goes_all_the_way():
    commands = [command for block in blocks("write-a-method.md") for command in block.commands]
    assert [command.split()[1] for command in commands] == ["new", "run", "compare", "methods", "deploy"]
    assert "--local 4" in commands[-1]
    assert "check_method(" in PAGES["write-a-method.md"]


@pytest.mark.slow
def test_the_test_that_the_tutorial_writes_still_passes_with_its_second_method(tmp_path):
    assert main(["new", "method", "steady", "--folder", str(tmp_path)]) == 0
    [second] = [block.text for block in blocks("write-a-method.md") if block.file == "steady.py"]
    (tmp_path / "steady.py").write_text(second, encoding="utf-8")
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_steady.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout


@pytest.mark.parametrize("page", PAGES)
def test_shell_examples_name_real_commands_and_options(page):
    from typer.main import get_command

    for command in (command for block in blocks(page) for command in block.commands):
        _, name, *arguments = shlex.split(command)
        known = get_command(app).commands[name]
        if arguments and arguments[0] in getattr(known, "commands", ()):
            known = known.commands[arguments[0]]
        options = {option for parameter in known.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {argument for argument in arguments if argument.startswith("-")} <= options, command


@pytest.mark.parametrize(
    "path", [*DOCS.glob("**/*.md"), *ROOT.glob("*.md"), ROOT / "results" / "README.md"], ids=lambda path: path.name
)
def test_lines_are_not_too_long_and_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines() if path.name not in WITH_LONG_TABLES or line[:1] != "|") <= 120
    made = {"methods/index.md", "../methods/index.md", "at-a-glance.html"}
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", re.sub(r"(?ms)^```.*?^```", "", text)):
        assert link in made or (path.parent / link).exists(), link


# What is drawn from the code ------------------------------------------------------------------------------------------


def test_architecture_lists_every_hook_and_no_other():
    table = PAGES["architecture.md"].partition("| when | hook |")[2].partition("\n\n")[0]
    listed = re.findall(r"`(\w+)`", table)
    hooks = [name for name, value in vars(Part).items() if inspect.isfunction(value) and not name.startswith("_")]
    assert listed == [name for name in hooks if name not in ("parts", "notes")]


def test_the_round_is_drawn_with_every_hook_in_its_order_and_on_its_side():
    from site_pages import drawn

    hooks = {hook.name: hook for hook in drawn.hooks()}
    picture = drawn.diagram()
    places = [picture.index(f"<code>{name}</code>") for name in hooks]
    assert places == sorted(places)
    assert (hooks["select"].side, hooks["loss"].side, hooks["keeps"].side) == ("server", "client", "both")
    assert [name for name, hook in hooks.items() if hook.at_every_step] == ["effective", "loss", "gradients", "project"]
    assert [name for name, hook in hooks.items() if hook.sends] == ["broadcast", "upload"]
    assert picture.index("broadcast") < picture.index("round-from-server") < picture.index("receive")


def test_every_diagnostic_is_listed_with_what_it_needs_and_its_numbers():
    from site_pages import drawn

    rows = drawn.diagnostic_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == diagnostics.names()
    for name, row in zip(diagnostics.names(), rows, strict=True):
        one = diagnostics.get(name)
        assert all(f"`{metric}`" in row for metric in one.quantities), name
        assert all(need.value.removeprefix("the ") in row for need in one.needs), name


def test_everything_that_can_be_refused_is_told():
    from site_pages import drawn

    decisions, matters = drawn.decisions(), drawn.matters()
    assert all(decision.value in decisions for decision in Decision)
    assert all(f"| {matter.relied_on} | {matter.taken_away} |" in matters for matter in Matter)
    assert drawn.refusals().count("cannot be combined") == 3


def test_pages_ask_only_for_what_can_be_drawn():
    from site_pages import drawn

    asked = {name for path in DOCS.glob("**/*.md") for name in re.findall(r"<!-- drawn: (\w+) -->", path.read_text())}
    assert asked == drawn.PIECES.keys()


def test_the_catalogue_has_every_method():
    from site_pages import catalogue

    pages = catalogue.pages()
    for name in methods.names():
        facts = methods.get(name).facts
        text = pages[catalogue.path_of(facts.family)]
        section = text.partition(f"{{ #{name} }}")[2].partition("\n## ")[0]
        assert facts.paper in section, name
        assert facts.link in section, name
        for field in methods.describe(name)["parameters"]:
            [row] = re.findall(rf"(?m)^\| `{field['name']}` \|.*", section)
            assert len(re.sub(r"`[^`]*`|\\\|", "", row).split("|")) == 7, row
    assert f"has {len(methods.names())} methods" in pages["methods/index.md"]


def test_docstrings_become_markdown():
    from site_pages.docstrings import to_markdown

    assert to_markdown(">>> 1 + 1\n2\n\nMore.") == "```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    table = "=====  =====\nLIPS   :func:`keep`,\n       :func:`drop`\n=====  =====\n\nAfter."
    assert to_markdown(table) == "| | |\n|---|---|\n| LIPS | `keep`, `drop` |\n\nAfter."
    link = '<autoref identifier="fedstrata.a.b" optional><code>b</code></autoref>'
    assert to_markdown("See :func:`~a.b`.", lambda name: f"fedstrata.{name}") == f"See {link}."


# The site -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site without running notebooks, where what builds it is installed."""
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    pytest.importorskip("latex2mathml")
    folder = tmp_path_factory.mktemp("documentation") / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "RUN_NOTEBOOKS": "false", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_needs_no_network(site):
    loading = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    for page in site.rglob("*.html"):
        assert not loading.findall(page.read_text(encoding="utf-8")), page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?:", style.read_text(encoding="utf-8")), style


def test_nothing_of_docstrings_is_left_as_it_was(site):
    for page in site.rglob("*.html"):
        text = re.sub(r"(?s)<(code|script)\b.*?</\1>", "", page.read_text(encoding="utf-8"))
        assert not re.findall(r":(?:math|class|meth|func|attr|mod):", text), page
        assert "<autoref" not in text, page
    assert "<math" in (site / "methods" / "local-objective.html").read_text(encoding="utf-8")
