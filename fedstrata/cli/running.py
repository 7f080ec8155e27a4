"""The commands that train, and those that show what training gave: run, compare, resume, report."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.completing import completing
from fedstrata.cli.loading import loading_pytorch
from fedstrata.cli.options import (
    EXPERIMENT_KEYS,
    ExperimentFile,
    FigureFont,
    Figures,
    FigureWidth,
    Json,
    LearningRate,
    Log,
    NoReport,
    Quiet,
    Settings,
    add_command,
    read_experiment,
)
from fedstrata.cli.terminal import Stopped, messages, telling
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment

if TYPE_CHECKING:
    from fedstrata.comparing import PlannedRun
    from fedstrata.report.paper_figures import FiguresAsked

PAGE = "report.html"
PAGE_ENDINGS = (".html", ".htm")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    add_command(
        app,
        run,
        EXPERIMENT_KEYS,
        (
            "fedstrata run --method fedbn --partition dirichlet:0.1 --rounds 30",
            "fedstrata run --data cifar100 --model resnet8 --clients 100 --learning-rate 0.05",
            "fedstrata run experiment.toml --set 'method=fedprox(mu=0.01)' --out runs/a",
            "fedstrata run --continue runs/a --rounds 200",
        ),
    )
    add_command(
        app,
        compare,
        tuple(key for key in EXPERIMENT_KEYS if key != "method"),
        (
            "fedstrata compare 'fedavg, fedbn, local' --seeds 3",
            "fedstrata compare 'fedavg, fedprox:0.01, fedprox:0.1' --rounds 50 --out runs/fedprox",
            "fedstrata compare 'fedavg, fedbn, local' --seeds 5 --jobs auto",
            "fedstrata compare 'fedbn, lips' --sweep partition.alpha=0.01,0.1,0.5",
        ),
    )
    add_command(app, resume)
    add_command(
        app,
        report,
        examples=("fedstrata report runs/a runs/b -o page.html", "fedstrata report runs/compare --figures figures"),
    )


def run(
    changes: dict[str, Any],
    experiment_file: ExperimentFile = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the run; by default one in runs/, named after method, data and seed."),
    ] = None,
    continued: Annotated[
        Path | None,
        typer.Option(
            "--continue", metavar="RUN", help="Go on with this finished run, until it has as many --rounds in all."
        ),
    ] = None,
    learning_rate: LearningRate = None,
    settings: Settings = None,
    log: Log = None,
    no_report: NoReport = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment.

    Everything about it is kept in a folder, from which it can be resumed, compared and reported.
    """
    if continued is not None:
        others = {"EXPERIMENT.TOML": experiment_file, "--out": out, "--learning-rate": learning_rate, "--set": settings}
        given = [*(f"--{key.replace('_', '-')}" for key in changes if key != "rounds")]
        refused = [*(key for key, value in others.items() if value), *given]
        _extend(continued, changes.get("rounds"), refused, log, quiet)
        from fedstrata.cli.showing import show_run

        show_run(continued, None if no_report else continued / PAGE, json, quiet)
        return
    experiment = read_experiment(experiment_file, settings, changes, learning_rate, quiet)
    with loading_pytorch(quiet):
        from fedstrata import api
        from fedstrata.cli.showing import show_run
        from fedstrata.progress import show_progress

    folder = out or unused_folder(experiment)
    with (
        stoppable(f"fedstrata resume {shlex.quote(str(folder))}", folder),
        show_progress(messages, 1, experiment.rounds, quiet) as progress,
    ):
        progress.begin(f"{experiment.method}, seed {experiment.seed}")
        api.run(experiment, out=folder, log=log, progress=progress)
    show_run(folder, None if no_report else folder / PAGE, json, quiet)


def _extend(folder: Path, rounds: int | None, others: Sequence[str], log: list[str] | None, quiet: bool) -> None:
    """Go on with a finished run; nothing but its length may change."""
    if others:
        raise FedStrataError(f"A run goes on as it began: '{others[0]}' cannot be given with --continue.")
    if rounds is None:
        raise FedStrataError("Say how many rounds the run is to have in all: --continue RUN --rounds 200.")
    with loading_pytorch(quiet):
        from fedstrata import api
        from fedstrata.progress import show_progress
        from fedstrata.runs.folder import RunFolder

    run = RunFolder.open(folder)
    done = int(run.summary()["rounds"]) if run.finished else 0
    with (
        stoppable(f"fedstrata resume {shlex.quote(str(folder))}", folder),
        show_progress(messages, 1, max(rounds - done, 1), quiet) as progress,
    ):
        progress.begin(f"{run.experiment.method}, seed {run.experiment.seed}")
        api.extend(folder, rounds, log=log, progress=progress)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an interrupted run.")],
    log: Log = None,
    no_report: NoReport = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with an interrupted run.

    The result is the same as without the interruption.
    """
    with loading_pytorch(quiet):
        from fedstrata import api
        from fedstrata.cli.showing import show_run
        from fedstrata.comparing import PlannedRun
        from fedstrata.progress import show_progress
        from fedstrata.runs.folder import RunFolder

    planned = PlannedRun.find(RunFolder.open(folder).experiment, folder)
    with (
        stoppable(f"fedstrata resume {shlex.quote(str(folder))}", folder),
        show_progress(messages, 1, planned.rounds_left, quiet) as progress,
    ):
        progress.begin(planned.name)
        api.resume(folder, log=log, progress=progress)
    show_run(folder, None if no_report else folder / PAGE, json, quiet)


def compare(
    changes: dict[str, Any],
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHODS... [EXPERIMENT.TOML]",
            help="The methods, such as 'fedavg, fedbn, fedprox(mu=0.01)', or 'all'; and a file with the keys of an "
            "experiment, if its name ends in .toml.",
            autocompletion=completing("methods"),
        ),
    ],
    seeds: Annotated[
        str, typer.Option(metavar="N", help="How many seeds to run each method with, from --seed on.")
    ] = "1",
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="Run everything with each of these values of a key of the experiment (clients=10,20,50), or of a "
            "parameter inside one (partition.alpha=0.01,0.1,0.5; method.mu=0.1,1); repeated: with each combination.",
        ),
    ] = None,
    jobs: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="How many runs to do at a time, each in a process of its own; auto: as many as keep the GPU or the "
            "cores busy. The numbers do not depend on it.",
        ),
    ] = "1",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the runs, where nothing is done twice; by default runs/compare, "
            "or with a number if that holds another experiment."
        ),
    ] = None,
    learning_rate: LearningRate = None,
    settings: Settings = None,
    figures: Figures = None,
    figure_width: FigureWidth = None,
    figure_font: FigureFont = None,
    log: Log = None,
    no_report: NoReport = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods on the same data, side by side.

    The outcome is a table and a report. Interrupted, it goes on where it was when it is called again in the same way.
    Where a run fails, the others are done all the same, and table and report are of these.
    """
    figures_asked = read_figures(figures, figure_width, figure_font)
    count = _read_seeds(seeds)
    files = [Path(text) for text in methods if text.endswith(".toml")]
    if len(files) > 1:
        raise FedStrataError(f"A comparison takes the file of one experiment, not of {len(files)}; keep one of them.")
    experiment = read_experiment(files[0] if files else None, settings, changes, learning_rate, quiet)
    with loading_pytorch(quiet):
        from fedstrata import comparing
        from fedstrata.cli.showing import show_comparison
        from fedstrata.loggers import make_loggers
        from fedstrata.progress import show_progress

    kept = make_loggers(log)
    texts = comparing.read_methods(", ".join(text for text in methods if not text.endswith(".toml")))
    with telling(f"looking for finished runs and loading the data {experiment.data}", quiet):
        planned, folder = planned_runs(experiment, texts, count, out, sweep)
    at_a_time = comparing.choose_jobs(jobs, planned)
    to_do = [one for one in planned if one.state != "finished"]
    if len(to_do) < len(planned) and not quiet:
        messages.print(
            f"{len(planned) - len(to_do)} of {len(planned)} runs are finished already and taken from '{folder}'.",
            soft_wrap=True,
        )
    with (
        stoppable("the same command", folder),
        show_progress(messages, len(to_do), sum(one.rounds_left for one in to_do), quiet, at_a_time) as progress,
    ):
        failed: comparing.RunsFailedError | None = None
        try:
            comparing.perform(planned, progress, at_a_time=at_a_time, log=kept)
        except comparing.RunsFailedError as error:
            failed = error
    done = [one for one in planned if failed is None or one.name not in failed.failed]
    folders = [one.path for one in done if one.path is not None]
    if folders:
        page = None if no_report else folder / PAGE
        why = {} if failed is None else failed.failed
        show_comparison(folders, page, json, quiet, out=folder, figures=figures_asked, failed=why)
    if failed is not None:
        failed.raise_worst()


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders of runs, folders that hold such folders, or published ones as in results/."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The page to write; by default report.html, inside the folder if only one of runs is given.",
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="The title of the page.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="What the others are tested against; by default the first method."),
    ] = None,
    figures: Figures = None,
    figure_width: FigureWidth = None,
    figure_font: FigureFont = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a page over one or more runs.

    The page is one file that needs no network; the table of the runs is printed too.
    """
    with telling("loading what reads and draws runs", quiet):
        from fedstrata.cli.showing import show_comparison

    asked = read_figures(figures, figure_width, figure_font)
    if output is not None and output.suffix.lower() not in PAGE_ENDINGS:
        raise FedStrataError(
            f"The report is a page, which cannot be written to '{output}'; name a file that ends in "
            f"{' or '.join(PAGE_ENDINGS)}, or give --figures DIR for charts and tables as PDF, SVG, PNG and LaTeX."
        )
    folders = run_folders(runs)
    beside = len(runs) == 1 and (folders[0] / "experiment.toml").exists()
    page = output or (runs[0] / PAGE if beside else Path(PAGE))
    show_comparison(folders, page, json, quiet, title=title, figures=asked, reference=reference)


def _read_seeds(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise FedStrataError(
            f"'--seeds {text}' is no number of seeds; say how many each method runs with, counted from --seed on, such "
            "as --seeds 3."
        ) from None


def read_figures(folder: Path | None, width: str | None, font: str | None) -> FiguresAsked | None:
    """Check what is asked for of figures before any work is done for them; options without a folder do nothing."""
    given = {"--figure-width": width, "--figure-font": font}
    for option, value in given.items():
        if folder is None and value is not None:
            raise FedStrataError(f"'{option} {value}' does nothing without --figures DIR, where figures are written.")
    if folder is None:
        return None
    from fedstrata.report.paper_figures import FiguresAsked

    return FiguresAsked(folder, width or "column", font or "serif")


def unused_folder(experiment: Experiment) -> Path:
    """Find a folder in ``runs/`` that does not exist yet, named after method, data and seed."""
    from fedstrata.comparing import file_name, numbered

    name = f"{file_name(experiment.method)}-{file_name(experiment.data)}-seed{experiment.seed}"
    return next(path for path in numbered(Path("runs") / name) if not path.exists())


def planned_runs(
    experiment: Experiment, methods: Sequence[str], seeds: int, out: Path | None, sweep: Sequence[str] | None = None
) -> tuple[list[PlannedRun], Path]:
    """Plan the runs of a comparison in a folder.

    By default it is the first of runs/compare, runs/compare-2 and so on that holds nothing, or runs of the same
    experiment. The data is loaded once, also to tell experiments apart.
    """
    from fedstrata.comparing import OtherExperimentError, numbered, plan
    from fedstrata.runs.preparing import Ingredients, NamedData
    from fedstrata.runs.sweeping import read_sweeps

    given, sweeps = Ingredients(named=NamedData()), read_sweeps(sweep)
    for path in numbered(Path("runs/compare")) if out is None else ():
        with suppress(OtherExperimentError):
            return plan(experiment, methods, seeds, path, given, sweeps), path
    assert out is not None
    return plan(experiment, methods, seeds, out, given, sweeps), out


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Take each path as a run, or as a folder of runs; what lies beside runs is named by a shell's ``*``, too."""
    from fedstrata.runs.folder import ORDER_FILE, runs_inside

    found: dict[Path, None] = {}
    for path in [path for path in paths if path.name not in (PAGE, ORDER_FILE) or not path.is_file()] or paths:
        inside = runs_inside(path) if not (path / "experiment.toml").exists() else []
        found |= dict.fromkeys(inside or [path])
    return list(found)


@contextmanager
def stoppable(how_to_go_on: str, folder: Path) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end a command with a word about what is saved and how to go on."""
    from fedstrata.runs.signals import Interrupted

    def terminate(number: int, frame: object) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except (Interrupted, KeyboardInterrupt, _Terminated) as stop:
        if isinstance(stop, Interrupted):
            number, saved = stop.signal_number, stop.saved
        else:
            number, saved = signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT, ""
        begun = (folder / "experiment.toml").exists() or any(folder.glob("*/experiment.toml"))
        words = f"{saved}; go on" if saved else "Go on from the last checkpoint"
        raise Stopped(
            f"{words} with: {how_to_go_on}" if saved or begun else "Nothing was begun, nothing is lost.", 128 + number
        ) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Terminated(BaseException):
    """SIGTERM came outside the rounds of a run."""
