import json
import re
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import MakeRun

from fedstrata.errors import FedStrataError
from fedstrata.report import write_report
from fedstrata.report.markup import Markup, breakable, element

HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=alert(1)>\"'&"


class Page(HTMLParser):
    """The texts and elements of a page, as a browser would see them, and whether every element is closed."""

    VOID = frozenset({"meta", "input", "br", "wbr"})

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(content)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def charts_of(content: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', content, re.DOTALL)
    assert found
    charts: dict[str, Any] = json.loads(found.group(1))["charts"]
    return charts


def report(tmp_path: Path, *runs: Path, title: str | None = None) -> str:
    return write_report(runs, tmp_path / "out" / "report.html", title).read_text(encoding="utf-8")


def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)


def test_several_methods_and_seeds(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [
        make_run(f"{method}-{seed}", method=method, seed=seed, level=level, personal=method == "fedbn", layers=True)
        for method, level in (("fedavg", 0.7), ("fedbn", 0.9))
        for seed in (0, 1, 2)
    ]
    content = report(tmp_path, *runs)
    page = Page(content)
    assert "fedavg and fedbn on digits" in page.text
    assert "2 methods · 3 seeds each" in page.text
    assert "Highest accuracy in the last round: fedbn" in page.text
    assert "How equally the clients fare" in page.text
    assert "p: two-sided paired t-test over seeds against fedavg." in page.text
    charts = ["accuracy", "loss", "clients", "client-table", "skew", "pareto", "cost", "traffic", "time", "layers"]
    assert sorted(charts_of(content)) == sorted(charts)
    assert next(iter(charts_of(content))) == "layers"
    anchors = {attributes["href"] for attributes in page.all("a")}
    assert anchors == {f"#{attributes['id']}" for attributes in page.all("section")}
    assert len(page.all("caption")) == len(page.all("table"))
    places = {str(attributes["id"]): attributes for attributes in page.all("div") if attributes.get("class") == "chart"}
    assert set(places) == {f"chart-{name}" for name in charts_of(content)}
    assert all(attributes["aria-label"] for attributes in places.values())


def test_nothing_is_fetched(tmp_path: Path, make_run: MakeRun) -> None:
    content = report(tmp_path, make_run("a"))
    page = Page(content)
    assert not page.all("link")
    assert all("src" not in attributes for _, attributes in page.elements)
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert len(re.findall("'sha256-", policy)) == 2


def test_one_run_has_no_comparison(tmp_path: Path, make_run: MakeRun) -> None:
    page = Page(report(tmp_path, make_run("a"), title="My run"))
    assert page.text.startswith("My run My run")
    assert "Against" not in page.text
    assert "One seed: no standard deviation over seeds, and no test." in page.text


def test_rerun_gives_the_shared_settings_and_one_command_per_run(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [make_run(f"{seed}", method="fedprox(mu=0.01)", seed=seed, epochs=2) for seed in (0, 7)]
    content = report(tmp_path, *runs)
    toml, commands = (block for block in re.findall(r"<pre[^>]*><code>(.*?)</code></pre>", content, re.DOTALL))
    shared = tomllib.loads(toml.replace("&quot;", '"'))
    assert shared["method"] == "fedprox(mu=0.01)"
    assert shared["epochs"] == 2
    assert "seed" not in shared
    assert commands.splitlines() == [
        "fedstrata run experiment.toml --set seed=0 --out rerun/0",
        "fedstrata run experiment.toml --set seed=7 --out rerun/7",
    ]


def test_what_came_from_python_cannot_be_rerun_by_a_command(tmp_path: Path, make_run: MakeRun) -> None:
    page = Page(report(tmp_path, make_run("a", model="python:MyNet")))
    assert "came from a Python program (MyNet)" in page.text
    assert "fedstrata run experiment.toml" not in page.text


def test_names_are_never_markup(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [
        make_run("a", method=HOSTILE, class_names=(HOSTILE, *"123456789")),
        make_run("b", method="$title ${body} {{x}}"),
    ]
    content = report(tmp_path, *runs, title=HOSTILE)
    page = Page(content)
    assert not page.all("img")
    assert len(page.all("script")) == 3
    assert HOSTILE in " ".join(page.texts)
    assert "$title ${body} {{x}}" in page.text
    assert HOSTILE in charts_of(content)["skew"]["datasets"]["rows"]["class"]["texts"]


def test_without_the_extra_the_page_has_tables_and_says_how_to_get_charts(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_charts(monkeypatch)
    page = Page(report(tmp_path, make_run("a"), make_run("b", method="fedbn")))
    assert "pip install 'fedstrata[report]'" in page.text
    assert not page.all("figure")
    assert len(page.all("script")) == 1
    assert "Accuracy, traffic and time of each method" in page.text
    assert "How equally the clients fare" in page.text


def test_unfinished_repeated_and_empty_runs_are_named(tmp_path: Path, make_run: MakeRun) -> None:
    empty = make_run("empty", method="local", finish=False)
    for checkpoint in (empty / "checkpoints").iterdir():
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    runs = [
        make_run("whole"),
        make_run("again", checkpoint_every=3),
        make_run("half", method="fedbn", finish=False),
    ]
    page = Page(report(tmp_path, *runs, empty))
    assert "again repeats seed 0 of fedavg; it is not counted again." in page.text
    assert "half is not finished: its numbers are those after round 12 of 12." in page.text
    assert "empty has no numbers yet, and is left out." in page.text
    with pytest.raises(FedStrataError, match="None of the 1 runs given has any numbers"):
        report(tmp_path, empty)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedStrataError, match="There is no run folder"):
        report(tmp_path, tmp_path / "nowhere")
    with pytest.raises(FedStrataError, match="None of the 0 runs"):
        report(tmp_path)


def test_different_headlines_are_told_apart(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [make_run("a"), make_run("b", method="fedavg-ft", adapted=True, headline="client_adapted")]
    page = Page(report(tmp_path, *runs))
    assert "Own model after fine-tuning" in page.text
    assert "fine\u2011tuning" in page.text.partition("Every labelled number")[0]


def test_of_many_methods_eight_are_in_colour_and_all_lists_have_one_order(tmp_path: Path, make_run: MakeRun) -> None:
    methods = [f"fedprox(mu={number / 100})" for number in range(10)]
    runs = [
        make_run(str(n), method=m, rounds=3, clients=3, level=0.95 if n == 9 else 0.5) for n, m in enumerate(methods)
    ]
    page = Page(report(tmp_path, *runs))
    chips = [chip for chip in page.all("button") if "data-method" in chip]
    pressed = [chip["data-method"] for chip in chips if chip.get("aria-pressed") == "true"]
    assert len(pressed) == 8
    assert pressed[:2] == [methods[0], methods[-1]]
    assert any(field.get("type") == "search" for field in page.all("input"))
    # The table of results stands in the order of the legend: the reference, and then by accuracy.
    table = page.text.partition("Accuracy, traffic and time")[2].partition("Bold:")[0]
    places = [table.index(str(chip["data-method"])) for chip in chips]
    assert places == sorted(places)


def test_the_same_runs_give_the_same_page(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run("a")
    assert report(tmp_path, run) == report(tmp_path, run)


def test_markup_escapes_all_but_markup() -> None:
    assert element("a", "<b>", Markup("<i>x</i>"), href='"', hidden=False, data_x=None, open=True) == (
        '<a href="&quot;" open>&lt;b&gt;<i>x</i></a>'
    )
    assert breakable("a+<b>(c") == "a+<wbr>&lt;b&gt;(<wbr>c"


def test_one_method_in_several_settings_is_one_method(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [make_run(f"rounds-{rounds}", method="fedavg", rounds=rounds) for rounds in range(4, 9)]
    page = Page(report(tmp_path, *runs))
    assert "1 method · 5 settings · 1 seed each" in page.text
    assert "1 method in 5 settings on digits" in page.text
