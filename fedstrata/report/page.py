"""The report: one page over one or many runs."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata import files
from fedstrata._version import __version__
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.report import charts, formats, series
from fedstrata.report.charts import Drawing
from fedstrata.report.document import document
from fedstrata.report.labels import LABELS, STATISTICS, label_of, meaning, metric_title, short_name
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.reading import Run, read_run
from fedstrata.report.tables import Cell, Column, table
from fedstrata.statistics import Estimate, Group, Row, comparison_rows, estimate, group_runs, headline_key, notes


def write_report(runs: Sequence[Path], output: Path, title: str | None = None) -> Path:
    """Write one self-contained page over the runs in the given folders; seeds of one method are taken together.

    Without the extra ``report`` the page has its tables but no charts, and says how to get them.
    """
    output = Path(output)
    content = report([read_run(path) for path in runs], title, with_charts=charts.charts_are_possible())
    files.make_folder(output.parent)
    files.write_atomically(output, content)
    return output


def report(runs: Sequence[Run], title: str | None = None, with_charts: bool = True) -> str:
    """Build the page as text."""
    started = [run for run in runs if run.metrics.latest()]
    if not started:
        raise FedStrataError(
            f"None of the {len(runs)} runs given has any numbers yet; give the folder of a run that has begun."
        )
    view = _View.of(started, title)
    sections = [
        section
        for build in (_results, _curves, _clients, _data, _costs, _layers, _meanings, _configuration, _rerun, _environment)
        if (section := build(view, with_charts)) is not None
    ]
    body = join(
        (
            _header(view, [run for run in runs if run not in started], with_charts),
            element("div", _sidebar(view, sections, with_charts), element("main", *_contents(sections)), class_="layout"),
            element("footer", element("p", f"Written by FedStrata {__version__} from the folders of the runs alone.")),
        )
    )
    drawn = {name: chart for section in sections for name, chart in section.charts.items()} if with_charts else {}
    return document(view.title, body, drawn, view.methods)


@dataclass(frozen=True)
class _View:
    """What every section looks at. ``methods`` are in the order of their colours, ``chosen`` those first in colour."""

    title: str
    groups: list[Group[Run]]
    rows: list[Row]
    methods: list[str]
    chosen: list[str]

    @classmethod
    def of(cls, runs: Sequence[Run], title: str | None) -> _View:
        groups, rows = group_runs(runs), comparison_rows(runs)
        methods = [row.label for row in rows]
        if len(methods) > charts.COLOURS:
            methods = [row.label for row in sorted(rows, key=_accuracy_or_nothing, reverse=True)]
            # The reference keeps its colour, whatever its rank: everything is compared with it.
            methods.remove(rows[0].label)
            methods.insert(0, rows[0].label)
        return cls(title or _default_title(groups), groups, rows, methods, methods[: charts.COLOURS])

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]

    def names(self) -> dict[Path, str]:
        """Short names of the runs: their folders, as seen from the folder that holds them all."""
        paths = {run.path: run.path.resolve() for group in self.groups for run in (*group.runs, *group.repeated)}
        root = Path(os.path.commonpath([path.parent for path in paths.values()]))
        return {path: place.relative_to(root).as_posix() for path, place in paths.items()}


@dataclass(frozen=True)
class _Section:
    anchor: str
    title: str
    body: Markup
    charts: Mapping[str, Drawing] = dataclasses.field(default_factory=dict)


def _default_title(groups: Sequence[Group[Run]]) -> str:
    datasets = " and ".join(dict.fromkeys(str(run.data["dataset"]) for group in groups for run in group.runs))
    methods = [group.label for group in groups]
    if len(methods) > 4:
        return f"{len(methods)} methods on {datasets}"
    listed = methods[0] if len(methods) == 1 else f"{', '.join(methods[:-1])} and {methods[-1]}"
    return f"{listed} on {datasets}"


def _header(view: _View, empty: Sequence[Run], with_charts: bool) -> Markup:
    facts = [
        formats.plural(len(view.groups), "method"),
        _range([len(group.runs) for group in view.groups], "seed") + (" each" if len(view.groups) > 1 else ""),
        *(_shared(view, key) for key in ("data", "partition", "model")),
        _range([len(run.data["sizes"]) for run in view.runs], "client"),
        _range([int(run.experiment["rounds"]) for run in view.runs], "round"),
    ]
    warnings = [
        *(f"{run.path.name} has no numbers yet, and is left out." for run in empty),
        *(
            f"{view.names()[run.path]} is not finished: its numbers are those after round {run.rounds_done} of "
            f"{run.experiment['rounds']}."
            for run in view.runs
            if not run.finished
        ),
        *(
            f"{view.names()[run.path]} repeats seed {run.experiment['seed']} of {group.label}, and is not counted again."
            for group in view.groups
            for run in group.repeated
        ),
    ]
    if not with_charts:
        warnings.append(
            f"This page has tables only. For the charts: {charts.HOW_TO_GET_CHARTS}, and then write the report again."
        )
    return element(
        "header",
        element("h1", view.title),
        element("p", " · ".join(fact for fact in facts if fact), class_="facts"),
        element("p", *_finding(view), class_="finding"),
        element("ul", *(element("li", warning) for warning in warnings), class_="warnings") if warnings else None,
        element("noscript", element("p", "Charts and sorting need JavaScript; the tables do not.")) if with_charts else None,
    )


def _finding(view: _View) -> Iterable[str]:
    """Say the result in a sentence or two."""
    with_accuracy = [row for row in view.rows if row.last is not None]
    if not with_accuracy:
        return ["No accuracy was measured."]
    top = max(with_accuracy, key=_accuracy_or_nothing)
    said: list[str] = [
        "Highest accuracy in the last round: " if len(with_accuracy) > 1 else "Accuracy in the last round: ",
        element("strong", top.label),
        f", {formats.percent(top.last)} %",
        f" ({short_name(top.headline).lower()})" if len(with_accuracy) == 1 else "",
    ]
    if top.comparison is not None and top.comparison.difference is not None:
        difference = top.comparison.difference.mean
        said.append(f", {abs(100 * difference):.1f} points above {top.comparison.reference}")
        if top.comparison.adjusted is not None:
            p = formats.p_value(top.comparison.adjusted)
            said.append(f" (p {p})" if p.startswith("<") else f" (p = {p})")
    said.append(". ")
    with_worst = [row for row in view.rows if row.worst is not None]
    if with_worst:
        fairest = max(with_worst, key=lambda row: row.worst.mean if row.worst else -1.0)
        whose = "The worst 10 % of its clients reach" if fairest is top else "Its worst 10 % of clients do best with"
        value = f"{formats.percent(fairest.worst)} %"
        if fairest is top:
            said += [f"{whose} {value}."]
        else:
            said += ["The worst 10 % of clients fare best with ", element("strong", fairest.label), f": {value}."]
    return said


def _sidebar(view: _View, sections: Sequence[_Section], with_charts: bool) -> Markup:
    links = [element("li", element("a", section.title, href=f"#{section.anchor}")) for section in sections]
    nav = element("nav", element("ul", *links), aria_label="Contents")
    return element("aside", nav, _legend(view) if with_charts and len(view.methods) > 1 else None)


def _legend(view: _View) -> Markup:
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


def _contents(sections: Sequence[_Section]) -> list[Markup]:
    return [
        element("section", element("h2", section.title), section.body, id=section.anchor) for section in sections
    ]


def _results(view: _View, with_charts: bool) -> _Section:
    rows = view.rows
    reference = rows[0].label
    compared = len(rows) > 1
    headlines = list(dict.fromkeys(row.headline for row in rows))
    uneven = len({len(row.seeds) for row in rows}) > 1
    columns = [
        Column("Method", numeric=False),
        *([Column("Measured on", "Which model on which test set", numeric=False)] if len(headlines) > 1 else []),
        Column("Last round", "Accuracy in the last round, in percent", group="Accuracy, %"),
        Column("Last ten", "Mean accuracy of the last ten evaluations, in percent", group="Accuracy, %"),
        Column("Best round", "Accuracy in the best round, in percent; a choice made on test data", group="Accuracy, %"),
        Column("Worst 10 %", "Mean accuracy of the worst 10 % of clients in the last round", group="Accuracy, %"),
        *(
            [
                Column("Points", f"Difference in the last round to {reference}", group=f"Against {reference}"),
                Column("p", "Paired t-test over seeds, corrected after Holm", group=f"Against {reference}"),
            ]
            if compared
            else []
        ),
        Column("Up", "Bytes from the clients to the server", group="Traffic"),
        Column("Down", "Bytes from the server to the clients", group="Traffic"),
        Column("Time", "Wall-clock time of a run"),
        *([Column("Seeds", "How many seeds were run")] if uneven else []),
    ]
    best = {name: _highest(rows, name) for name in ("last", "last_ten", "best", "worst")}

    def accuracy(row: Row, name: str) -> Cell:
        value: Estimate | None = getattr(row, name)
        number = None if value is None else value.mean
        return Cell(formats.percent(value), number, best=compared and number is not None and number == best[name])

    def amount(value: Estimate | None, write: Callable[[float | None], str]) -> Cell:
        number = None if value is None else value.mean
        return Cell(write(number), number)

    cells = []
    for row in rows:
        comparison = row.comparison
        difference = comparison.difference if comparison else None
        adjusted = comparison.adjusted if comparison else None
        cells.append(
            [
                row.label,
                *([short_name(row.headline)] if len(headlines) > 1 else []),
                *(accuracy(row, name) for name in ("last", "last_ten", "best", "worst")),
                *(
                    [
                        Cell(
                            "reference" if comparison is None else formats.points(difference),
                            None if difference is None else difference.mean,
                        ),
                        Cell(formats.p_value(adjusted), adjusted, hint=comparison.note if comparison else ""),
                    ]
                    if compared
                    else []
                ),
                amount(row.bytes_up, formats.data_size),
                amount(row.bytes_down, formats.data_size),
                amount(row.seconds, formats.duration),
                *([Cell(str(len(row.seeds)), float(len(row.seeds)))] if uneven else []),
            ]
        )
    measured = [
        f"Accuracy: {short_name(headline).lower()}. {meaning(headline)}".strip()
        for headline in (headlines if len(headlines) == 1 else [])
    ]
    body = (
        table("Accuracy, traffic and time of each method", columns, cells),
        element("ul", *(element("li", note) for note in [*measured, *notes(rows)]), class_="notes"),
        _all_numbers(view),
    )
    return _Section("results", "Results", join(body))


def _all_numbers(view: _View) -> Markup | None:
    metrics = [
        metric
        for metric in dict.fromkeys(metric for run in view.runs for metric in run.summary["final"])
        if label_of(metric) in LABELS or ".accuracy" in metric
    ]
    if not metrics:
        return None
    columns = [Column("Method", numeric=False), *(Column(_statistic(metric), group=_measure(metric)) for metric in metrics)]
    cells = []
    for group in view.groups:
        line: list[Cell | str] = [group.label]
        for metric in metrics:
            values = [run.summary["final"].get(metric) for run in group.runs]
            found = estimate(float(value) for value in values if value is not None)
            in_percent = ".accuracy" in metric
            text = formats.percent(found) if in_percent else formats.number(found)
            line.append(Cell(text, None if found is None else found.mean))
        cells.append(line)
    return element(
        "details",
        element("summary", "Every labelled number of the last round"),
        table("Last round, mean ± standard deviation over seeds; accuracies in percent", columns, cells),
    )


def _measure(metric: str) -> str:
    kind = "accuracy" if ".accuracy" in metric else "loss"
    return f"{short_name(label_of(metric))}: {kind}"


def _statistic(metric: str) -> str:
    words = {"mean": "mean", "std": "std over clients", "worst10": "worst 10 %"}
    return words.get(metric.rsplit(".", 1)[-1], "value")


def _curves(view: _View, with_charts: bool) -> _Section | None:
    if not with_charts:
        return None
    figures: list[Markup] = []
    drawn: dict[str, Drawing] = {}
    for kind, title in (("accuracy", "Accuracy"), ("loss", "Loss")):
        metrics = series.metric_names(view.groups, kind)
        rows = series.curve_rows(view.groups, metrics)
        if not rows:
            continue
        headline = view.rows[0].headline
        shown = next((name for name in (f"{headline}.{kind}.mean", f"{headline}.{kind}") if name in metrics), metrics[0])
        drawn[kind] = charts.curves(rows, view.methods, view.chosen, shown, kind, percent=kind == "accuracy")
        options = {metric: metric_title(metric) for metric in metrics}
        figures.append(
            _figure(
                kind,
                title,
                f"{title} over the rounds, one line per method.",
                "Line: mean over seeds. Band: one standard deviation over seeds."
                if any(len(group.runs) > 1 for group in view.groups)
                else "One seed for each method.",
                [_select(kind, "shown", "Measured", options, shown)],
            )
        )
    return _Section("curves", "Accuracy and loss", join(figures), drawn) if figures else None


def _clients(view: _View, with_charts: bool) -> _Section | None:
    metrics = series.client_metrics(view.groups) if with_charts else []
    rows = series.client_rows(view.groups, metrics)
    if not rows.boxes:
        return None
    headline = f"{view.rows[0].headline}.accuracy"
    shown = headline if headline in metrics else metrics[0]
    clients = sum(int(box["clients"]) for box in rows.boxes)
    thinned = f" {len(rows.points):,} of {clients:,} points are drawn." if len(rows.points) < clients else ""
    figure = _figure(
        "clients",
        "Accuracy of each client",
        "Accuracy of every client in the last round, one row per method.",
        "One point per client and seed, last round. Bar: the middle half of the clients. Stroke: the median." + thinned,
        [_select("clients", "shown", "Measured", {metric: metric_title(metric) for metric in metrics}, shown)],
    )
    return _Section(
        "clients", "Clients", figure, {"clients": charts.clients(rows, view.methods, view.chosen, shown)}
    )


def _data(view: _View, with_charts: bool) -> _Section:
    found = series.splits(view.groups)
    first = found[0]
    columns = [
        Column("Split", numeric=False),
        Column("Clients"),
        Column("Training samples", "smallest to largest client"),
        Column("Test samples", "smallest to largest client"),
        Column("Classes per client", "smallest to largest client"),
        Column("Effective classes", "exponential of the entropy of a client's labels, mean over clients"),
    ]
    cells = [
        [
            split.title,
            Cell(f"{len(split.sizes):,}", float(len(split.sizes))),
            Cell(_extent(split.sizes), float(split.sizes.mean())),
            Cell(_extent(split.test_sizes), float(split.test_sizes.mean())),
            Cell(_extent((split.label_counts > 0).sum(1)), float((split.label_counts > 0).sum(1).mean())),
            Cell(f"{_effective_classes(split.label_counts):.1f}", _effective_classes(split.label_counts)),
        ]
        for split in found
    ]
    facts = table("How the data is divided", columns, cells)
    if not with_charts:
        return _Section("data", "Data", facts)
    shown = [split for split in found if split.class_names == first.class_names][: series.SKEW_SPLITS]
    rows = [
        row
        for split in shown
        for row in series.skew_rows(split.label_counts, split.class_names, split=split.title)
    ]
    clients = max(len(split.sizes) for split in shown)
    caption = "The size of a bubble or the strength of a colour is the number of training samples."
    if clients > series.SKEW_CLIENTS:
        caption += f" The first {series.SKEW_CLIENTS} of {clients:,} clients are shown."
    if len(shown) < len(found):
        caption += f" {len(shown)} of {len(found)} splits are shown."
    figure = _figure(
        "skew",
        "Which client has which classes",
        "Number of training samples of each class at each client.",
        caption,
        [_select("skew", "split", "Split", {split.title: split.title for split in shown}, first.title)],
    )
    chart = charts.skew(rows, clients, first.class_names, first.title)
    return _Section("data", "Data", join((figure, facts)), {"skew": chart})


def _costs(view: _View, with_charts: bool) -> _Section | None:
    if not with_charts:
        return None
    cost, traffic, time = series.cost_rows(view.groups), series.traffic_rows(view.groups), series.time_rows(view.groups)
    figures: list[Markup] = []
    drawn: dict[str, Drawing] = {}
    if cost:
        measures = {
            "both": "bytes, both ways",
            "up": "bytes up, from clients",
            "down": "bytes down, to clients",
            "seconds": "seconds",
        }
        drawn["cost"] = charts.cost(cost, view.methods, view.chosen)
        figures.append(
            _figure(
                "cost",
                "Accuracy against cost",
                "Accuracy against bytes or seconds since the beginning of the run, one line per method.",
                "The accuracy of the results table, against all that was sent or spent up to that round.",
                [_select("cost", "measure", "Cost", measures, "both")],
            )
        )
    if any(row["bytes"] for row in traffic):
        drawn["traffic"] = charts.traffic(traffic, view.methods)
        figures.append(
            _figure(
                "traffic",
                "Bytes of a whole run",
                "Bytes up and down of a whole run, one bar per method.",
                "Bytes of the encoded messages of all clients, set-up included; mean over seeds.",
            )
        )
    if any(row["seconds"] for row in time):
        drawn["time"] = charts.time(time, view.methods)
        figures.append(
            _figure(
                "time",
                "Seconds of a whole run",
                "Seconds of a whole run by phase, one bar per method.",
                "Wall-clock time, mean over seeds. Only runs on the same, otherwise idle machine can be compared.",
            )
        )
    return _Section("cost", "Bytes and time", join(figures), drawn) if figures else None


def _layers(view: _View, with_charts: bool) -> _Section | None:
    rows = series.layer_rows(view.groups) if with_charts else []
    if not rows:
        return None
    metrics, methods = series.distinct(rows, "metric"), series.distinct(rows, "method")
    figure = _figure(
        "layers",
        "Layer by layer" if len(metrics) > 1 else f"Layer by layer: {metrics[0]}",
        "A metric of each layer over the rounds, one line per layer.",
        "Mean over seeds; the layers in the order of the model, from the input on.",
        [
            _select("layers", "shown", "Metric", {metric: metric for metric in metrics}, metrics[0]),
            _select("layers", "of", "Method", {method: method for method in methods}, methods[0]),
        ],
    )
    return _Section("layers", "Layers", figure, {"layers": charts.layers(rows)})


def _meanings(view: _View, with_charts: bool) -> _Section:
    used = {label_of(metric) for run in view.runs for metric in run.summary["final"]}
    terms = [
        element("div", element("dt", label.short, " ", element("code", name)), element("dd", label.meaning))
        for name, label in LABELS.items()
        if name in used
    ]
    general = {
        "Over clients": "Every client counts the same, however many samples it has. "
        + "; ".join(f"{name}: {words}" for name, words in STATISTICS.items())
        + ".",
        "Last round, last ten, best round": "The accuracy after the last round; the mean of the last ten evaluations; "
        "the highest of all evaluations. The best round is chosen on the test data and therefore flatters.",
        "Up and down": "Bytes that clients sent to the server, and bytes that they received from it, over all clients "
        "and rounds, counted from the encoded messages.",
    }
    terms += [element("div", element("dt", term), element("dd", words)) for term, words in general.items()]
    return _Section("meanings", "What the numbers mean", element("dl", *terms, class_="meanings"))


def _configuration(view: _View, with_charts: bool) -> _Section:
    documented = {field.name: str(field.metadata.get("doc", "")) for field in dataclasses.fields(Experiment)}
    common, differing = _common_and_differing([run.experiment for run in view.runs])
    shown = [key for key in differing if key != "seed"]
    parts: list[Markup | None] = []
    if shown:
        columns = [Column(key if key != "method" else "method", documented.get(key, ""), numeric=False) for key in shown]
        cells: list[list[Cell | str]] = [
            [_setting(group.runs[0].experiment.get(key)) for key in shown]
            + [", ".join(str(run.experiment.get("seed")) for run in group.runs)]
            for group in view.groups
        ]
        parts.append(table("What differs between the runs", [*columns, Column("seeds", numeric=False)], cells))
    heads = [Column("Setting", numeric=False), Column("Value", numeric=False), Column("Meaning", numeric=False)]
    settings: list[list[Cell | str]] = [
        [key, _setting(value), documented.get(key, "")] for key, value in common.items()
    ]
    parts.append(table("The same in all runs" if len(view.runs) > 1 else "Settings", heads, settings, sortable=False))
    parts.append(_run_list(view))
    return _Section("configuration", "Configuration", join(parts))


def _run_list(view: _View) -> Markup:
    names = view.names()
    columns = [
        Column("Run", numeric=False),
        Column("Method", numeric=False),
        Column("Seed"),
        Column("Accuracy, %", "Headline accuracy in the last round"),
        Column("Rounds"),
        Column("Time"),
        Column("Split", "Fingerprint of the split of the data", numeric=False),
    ]
    cells: list[list[Cell | str]] = []
    for group in view.groups:
        for run in group.runs:
            final = run.summary["final"]
            value = final.get(headline_key(str(run.summary["headline"]), final))
            found = None if value is None else estimate([float(value)])
            seconds = run.summary.get("seconds")
            cells.append(
                [
                    names[run.path],
                    group.label,
                    Cell(str(run.experiment["seed"]), float(run.experiment["seed"])),
                    Cell(formats.percent(found, 2), None if found is None else found.mean),
                    Cell(f"{run.rounds_done:,}", float(run.rounds_done)),
                    Cell(formats.duration(seconds), seconds),
                    run.split_hash,
                ]
            )
    summary = element("summary", f"The runs one by one ({len(cells):,})")
    return element("details", summary, table("The runs", columns, cells))


def _rerun(view: _View, with_charts: bool) -> _Section:
    common, differing = _common_and_differing([run.experiment for run in view.runs])
    toml = Experiment.from_mapping(dict(common)).to_toml()
    lines = [line for line in toml.splitlines() if line.split(" = ")[0] in common]
    names = view.names()
    commands = []
    for run in view.runs:
        settings = [f"--set {shlex.quote(f'{key}={_setting(run.experiment[key])}')}" for key in differing if key in run.experiment]
        commands.append(" ".join(["fedstrata run experiment.toml", *settings, "--out", shlex.quote(f"rerun/{names[run.path]}")]))
    body = (
        element("p", "Save this as ", element("code", "experiment.toml"), ":"),
        _copyable("\n".join(lines) + "\n", "experiment.toml"),
        element("p", "and run:" if len(commands) == 1 else "and run what you need of these, one line per run:"),
        _copyable("\n".join(commands) + "\n", "commands"),
    )
    return _Section("rerun", "Run it again", join(body))


def _environment(view: _View, with_charts: bool) -> _Section | None:
    values: dict[str, dict[str, None]] = {}
    for run in view.runs:
        for key, value in _flat(run.environment):
            values.setdefault(key, {})[_setting(value)] = None
    if not values:
        return None
    heads = [Column("Name", numeric=False), Column("Value", numeric=False)]
    cells: list[list[Cell | str]] = [[key.replace("_", " "), "; ".join(found)] for key, found in values.items()]
    return _Section("environment", "Environment", table("With what the runs were made", heads, cells, sortable=False))


def _figure(name: str, title: str, alt: str, caption: str, controls: Sequence[Markup | None] = ()) -> Markup:
    shown = [control for control in controls if control is not None]
    return element(
        "figure",
        element("h3", title),
        element("div", *shown, class_="controls") if shown else None,
        element("div", id=f"chart-{name}", class_="chart", role="img", aria_label=alt),
        element("figcaption", caption),
    )


def _select(chart: str, signal: str, title: str, options: Mapping[str, str], selected: str) -> Markup | None:
    """A menu that sets a parameter of a chart; none where there is nothing to choose."""
    if len(options) < 2:
        return None
    items = [
        element("option", text, value=value, selected=value == selected, title=meaning(label_of(value)) or None)
        for value, text in options.items()
    ]
    menu = element("select", *items, data_chart=chart, data_signal=signal)
    return element("label", element("span", title), menu)


def _copyable(text: str, what: str) -> Markup:
    button = element("button", "Copy", type="button", class_="copy", aria_label=f"Copy {what}")
    return element("div", element("pre", element("code", text), tabindex="0"), button, class_="copyable")


def _common_and_differing(experiments: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Part the settings into those that all runs share, with their value, and the names of the others."""
    known = [field.name for field in dataclasses.fields(Experiment)]
    keys = [key for key in known if any(key in experiment for experiment in experiments)]
    differing = [key for key in keys if len({repr(experiment.get(key)) for experiment in experiments}) > 1]
    return {key: experiments[0][key] for key in keys if key not in differing}, differing


def _setting(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}: ")
        else:
            yield f"{prefix}{key}", value


def _shared(view: _View, key: str) -> str:
    values = {str(run.experiment.get(key)) for run in view.runs}
    return values.pop() if len(values) == 1 else ""


def _range(numbers: Sequence[int], noun: str) -> str:
    low, high = min(numbers), max(numbers)
    return formats.plural(high, noun) if low == high else f"{low:,} to {formats.plural(high, noun)}"


def _extent(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _effective_classes(label_counts: np.ndarray) -> float:
    """The mean over clients of the exponential of the entropy of their labels: 1 for one class, C for C equal ones."""
    shares = label_counts / label_counts.sum(1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1)
    return float(np.exp(entropy).mean())


def _accuracy_or_nothing(row: Row) -> float:
    return -1.0 if row.last is None or not np.isfinite(row.last.mean) else row.last.mean


def _highest(rows: Sequence[Row], name: str) -> float | None:
    values = [value.mean for row in rows if (value := getattr(row, name)) is not None]
    return max(values, default=None)
