"""The report: one page over one or many runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstrata import files
from fedstrata._version import __version__
from fedstrata.errors import FedStrataError
from fedstrata.report import charts, formats, sections, settings
from fedstrata.report.document import Contents, document
from fedstrata.report.finding import finding
from fedstrata.report.further import further
from fedstrata.report.layer_section import layers
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.opening import read_runs
from fedstrata.report.published import PublishedRun
from fedstrata.report.ranking import ranking
from fedstrata.report.reading import Run, unfinished
from fedstrata.report.results import results
from fedstrata.report.side_by_side import side_by_side
from fedstrata.report.sweeps import sweeps
from fedstrata.report.view import Section, View


def write_report(runs: Sequence[Path], output: Path, title: str | None = None, reference: str | None = None) -> Path:
    """Write one self-contained page over the runs in the given folders; seeds of one method are taken together.

    Methods are tested against the ``reference``, if none against the first one.
    Without the extra ``report`` the page has its tables but no charts, and says how to get them.
    """
    output = Path(output)
    content = report(read_runs(runs), title, charts.charts_are_possible(), reference)
    files.make_folder(output.parent)
    files.write_atomically(output, content)
    return output


def report(
    runs: Sequence[Run], title: str | None = None, with_charts: bool = True, reference: str | None = None
) -> str:
    """Build the page as text."""
    return document(*contents(runs, title, with_charts, reference=reference))


def contents(
    runs: Sequence[Run],
    title: str | None = None,
    with_charts: bool = True,
    above: Sequence[Section] = (),
    lead: Sequence[str] = (),
    reference: str | None = None,
) -> Contents:
    """Build what the page shows: its title, its body, and the charts; what methods are tested against may be given.

    Sections of others stand ``above`` its own, and what these come to, ``lead``, in the place of the report's finding.
    """
    started = [run for run in runs if run.series]
    if not started:
        raise FedStrataError(
            f"None of the {len(runs)} runs given has any numbers yet; give the folder of a run that has begun."
        )
    view = View.of(started, title, reference)
    parts = [
        *above,
        results(view),
        layers(view, with_charts),
        further(view, with_charts),
        sweeps(view, with_charts),
        ranking(view, with_charts),
        sections.curves(view, with_charts),
        sections.clients(view, with_charts),
        sections.data(view, with_charts),
        sections.costs(view, with_charts),
        side_by_side(view),
        settings.meanings(view),
        settings.configuration(view),
        settings.rerun(view),
        settings.environment(view),
    ]
    shown = [part for part in parts if part is not None]
    content = element("div", _sidebar(view, shown, with_charts), element("main", *_contents(shown)), class_="layout")
    footer = element("footer", element("p", f"Written by FedStrata {__version__} from the folders of the runs alone."))
    body = join((_header(view, [run for run in runs if run not in started], with_charts, lead), content, footer))
    drawn = {name: chart for part in shown for name, chart in part.charts.items()}
    return Contents(view.title, body, drawn, view.methods)


def _header(view: View, empty: Sequence[Run], with_charts: bool, lead: Sequence[str]) -> Markup:
    methods = {str(run.experiment["method"]) for run in view.runs}
    facts = [
        formats.plural(len(methods), "method"),
        formats.plural(len(view.groups), "setting") if len(view.groups) > len(methods) else "",
        _range([len(group.runs) for group in view.groups], "seed") + (" each" if len(view.groups) > 1 else ""),
        *(_shared(view, key) for key in ("data", "partition", "model")),
        _range([run.experiment.get("clients", len(run.data.get("sizes", ()))) for run in view.runs], "client"),
        _range([int(run.experiment["rounds"]) for run in view.runs], "round"),
    ]
    warnings = [
        *(f"{run.path.name} has no numbers yet, and is left out." for run in empty),
        *unfinished(view.runs, view.names()),
        *(
            f"{view.names()[run.path]} repeats seed {run.experiment['seed']} of {group.label}; it is not counted again."
            for group in view.groups
            for run in group.repeated
        ),
    ]
    warnings += [
        f"{view.names()[run.path]} was stopped after round {run.summary['rounds']} of {run.experiment['rounds']}: "
        f"{run.summary['stopped']}."
        for run in view.runs
        if "stopped" in run.summary
    ]
    if any(isinstance(run, PublishedRun) for run in view.runs):
        warnings.append("Only tables of these runs were kept: nothing of single clients, of the split or of times.")
    if not with_charts:
        warnings.append(
            f"This page has tables only. For the charts: {charts.HOW_TO_GET_CHARTS}, and then write the report again."
        )
    return element(
        "header",
        element("h1", view.title),
        element("p", " ".join(lead), class_="lead") if lead else None,
        element("p", " · ".join(fact for fact in facts if fact), class_="facts"),
        None if lead else element("p", *finding(view), class_="finding"),
        element("ul", *(element("li", warning) for warning in warnings), class_="warnings") if warnings else None,
        element("noscript", element("p", "Charts and sorting need JavaScript; the tables do not."))
        if with_charts
        else None,
    )


def _sidebar(view: View, sections: Sequence[Section], with_charts: bool) -> Markup:
    links = [element("li", element("a", section.title, href=f"#{section.anchor}")) for section in sections]
    nav = element("nav", element("ul", *links), aria_label="Contents")
    return element("aside", nav, _legend(view) if with_charts and len(view.methods) > 1 else None)


def _legend(view: View) -> Markup:
    """The methods with their colours, for all charts at once: a press takes a method in front or back into the grey."""
    many = len(view.methods) > charts.COLOURS
    chips = [
        element(
            "button",
            element("span", class_="swatch", aria_hidden="true"),
            element("span", method, class_="name"),
            type="button",
            class_="chip",
            data_method=method,
            aria_pressed="true" if method in view.chosen else "false",
            title=method,
        )
        for method in view.methods
    ]
    tools = element(
        "div",
        element("input", type="search", id="find-method", placeholder="Find a method", aria_label="Find a method"),
        element("button", f"First {charts.COLOURS}", type="button", data_choose="first"),
        element("button", "All", type="button", data_choose="all"),
        element("button", "None", type="button", data_choose="none"),
        class_="tools",
    )
    hint = "Press a method to take it out of the grey, or back." if many else "Press a method to show or grey it."
    return element(
        "div",
        element("h2", "Methods"),
        element("p", hint, class_="hint"),
        tools if many else None,
        element("div", *chips, class_="chips", role="group", aria_label="Methods in colour"),
        class_="legend",
    )


def _contents(sections: Sequence[Section]) -> list[Markup]:
    return [element("section", element("h2", section.title), section.body, id=section.anchor) for section in sections]


def _shared(view: View, key: str) -> str:
    values = {str(run.experiment.get(key, "")) for run in view.runs}
    return values.pop() if len(values) == 1 else ""


def _range(numbers: Sequence[int], noun: str) -> str:
    low, high = min(numbers), max(numbers)
    return formats.plural(high, noun) if low == high else f"{low:,} to {formats.plural(high, noun)}"
