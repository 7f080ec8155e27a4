from __future__ import annotations

import re
import shlex
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cli_calls import TINY, Call

from fedstrata import api
from fedstrata.callbacks import RoundView
from fedstrata.cli.running import run_folders, unused_folder
from fedstrata.cli.showing import next_command
from fedstrata.data.datasets.digits import Digits
from fedstrata.experiment import Experiment


def read_toml(path: Path) -> dict[str, object]:
    return tomllib.loads(path.read_text())


def test_run_writes_a_folder_and_prints_a_summary(call: Call, tmp_path: Path) -> None:
    outcome = call("run", *TINY, "--rounds", "2", "--method", "fedprox:0.1", "--out", "runs/a")
    assert outcome.code == 0
    for expected in (
        "fedprox:0.1 on digits",
        "4 clients",
        "2 rounds",
        "Own model after aggregation",
        "worst 10 %",
        "runs/a/report.html",
    ):
        assert expected in outcome.out.replace("fedprox(mu=0.1)", "fedprox:0.1")
    assert "fedstrata compare 'fedavg, fedprox:0.1'" in outcome.out
    assert "accuracy" in outcome.err
    assert {"summary.json", "experiment.toml", "report.html", "metrics"} <= {
        path.name for path in (tmp_path / "runs/a").iterdir()
    }


def test_json_is_the_only_thing_on_standard_output(call: Call) -> None:
    outcome = call("run", *TINY, "--rounds", "1", "--method", "fedbn", "--json", "--no-report", "--out", "a")
    summary = outcome.json
    assert outcome.code == 0
    assert {"method", "rounds", "final", "bytes_up", "bytes_down", "seconds", "out"} <= set(summary)
    assert summary["method"] == "fedbn"
    assert summary["rounds"] == 1
    assert summary["out"] == "a"
    assert summary["report"] is None
    assert all(isinstance(value, int | float) for value in summary["final"].values())
    assert "Warning: The model has no normalisation layers" in outcome.err


def test_what_is_not_a_number_is_null_in_json(call: Call) -> None:
    outcome = call("run", *TINY, "--rounds", "2", "--learning-rate", "1e30", "--json", "--no-report")
    assert outcome.code == 0
    assert outcome.json["final"]["train.loss"] is None
    assert outcome.err.count("training has diverged") == 1
    assert len(set(re.findall("Warning: .*", outcome.err))) == len(re.findall("Warning: .*", outcome.err))


LIVELY = (*TINY, "--model", "mlp")
"""With a model so wide that at least one unit lives at any learning rate, and training can diverge."""


@pytest.mark.parametrize(("rounds", "rate"), [("1", "1e6"), ("3", "20")], ids=["at once", "from the second round on"])
def test_a_run_that_diverged_has_a_report_also_beside_one_that_did_not(call: Call, rounds: str, rate: str) -> None:
    """At a learning rate of 20 the first round's numbers are finite, later ones are not."""
    asked = ("--rounds", rounds, "--diagnose", "all", "--metrics", "f1+auc:each+confusion")
    lost = call("run", *LIVELY, *asked, "--learning-rate", rate, "--json", "--out", "lost")
    assert (lost.code, lost.json["final"]["train.loss"], lost.json["report"]) == (0, None, "lost/report.html")
    assert Path("lost/report.html").stat().st_size > 10_000
    assert call("run", *LIVELY, "--rounds", "2", "--no-report", "--quiet", "--out", "good").code == 0
    for arguments in (["report", "lost", "good", "-o", "page.html"], ["report", "lost", "-o", "page.html"]):
        outcome = call(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
    pytest.importorskip("altair")
    assert call("picture", "lost", "good", "-o", "layers.svg").code == 0


def test_one_diverged_method_does_not_cost_a_comparison_its_report(call: Call) -> None:
    """Clipped updates stay finite where those of FedAvg do not."""
    given = ("--rounds", "2", "--seeds", "2", "--learning-rate", "1e6", "--json", "--out", "both")
    outcome = call("compare", "fedavg, fedavg+norm-bound:1", *LIVELY, *given)
    assert (outcome.code, outcome.json["report"]) == (0, "both/report.html")
    assert [row["method"] for row in outcome.json["methods"]] == ["fedavg", "fedavg+norm-bound(bound=1.0)"]
    assert outcome.err.count("Warning: fedavg, seed") == 1
    assert "Warning: fedavg, seed 0: The training loss of client" in outcome.err
    assert "fedavg diverged in 2 of 2 seeds" in " ".join(outcome.json["notes"])
    page = Path("both/report.html").read_text()
    assert "Inside the layers" in page or "This page has tables only" in page


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_where_a_run_fails_table_and_page_show_the_others(call: Call, jobs: str) -> None:
    """With so large a pull towards the global model the updates are no numbers, which cannot be ranked."""
    failing = "fedprox(mu=1000000000.0)+lws"
    given = (*LIVELY, "--rounds", "3", "--out", "c", "--jobs", jobs)
    outcome = call("compare", f"fedavg, {failing}, local", *given)
    assert outcome.code == 2
    if jobs == "1":  # of several at a time it may be the last one that ends
        assert f"Warning: A run has failed, and the others go on. {failing}, seed 0: Tensor" in outcome.err
    last = outcome.err.splitlines()[-1]
    assert last.startswith(f"Error: 1 of 3 runs has failed, the others are finished. {failing}, seed 0: Tensor")
    assert re.search(r"^fedavg .*\n *local ", outcome.out, re.MULTILINE)
    page = Path("c/report.html").read_text()
    assert "local" in page
    assert "fedprox" not in page
    told = call("compare", f"fedavg, {failing}, local", *given, "--json")
    assert told.code == 2
    assert [row["method"] for row in told.json["methods"]] == ["fedavg", "local"]
    assert list(told.json["failed"]) == [f"{failing}, seed 0"]
    assert told.json["failed"][f"{failing}, seed 0"].startswith("Tensor ")
    again = call("compare", failing, *given)
    assert (again.code, again.out) == (2, "")  # of nothing there is no table


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_comparison_of_which_a_run_cannot_be_done_is_refused_before_any_trains(
    call: Call, tmp_path: Path, jobs: str
) -> None:
    refused = call("compare", "fedavg, fedrod", *TINY, "--loss", "focal", "--out", "both", "--jobs", jobs)
    assert refused.code == 2
    assert "'fedrod' decides the local loss itself" in refused.err
    assert "accuracy" not in refused.err
    assert not (tmp_path / "both").exists()


def test_a_picture_of_a_run_that_diverged_at_once_is_refused_in_a_sentence(call: Call) -> None:
    pytest.importorskip("altair")
    call("run", *LIVELY, "--rounds", "1", "--learning-rate", "1e6", "--no-report", "--quiet", "--out", "lost")
    assert "None of these runs has finite numbers of its layers" in call("picture", "lost", "-o", "a.svg").sentence


def test_quiet_says_nothing(call: Call) -> None:
    outcome = call("run", *TINY, "--rounds", "1", "--quiet", "--no-report", "--out", "a")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_options_change_what_the_file_and_set_say(call: Call, tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(
        "rounds = 5\nclients = 3\nepochs = 1\nmodel = 'mlp(hidden=8)'\nbatch_size = 16\n"
    )
    arguments = (
        "--set",
        "clients=4",
        "--set",
        "method=fedprox(mu=0.5)",
        "--set",
        "seed=7",
        "--rounds",
        "1",
        "--seed",
        "0",
        "--learning-rate",
        "0.01",
    )
    outcome = call("run", "experiment.toml", *arguments, "--out", "a", "--no-report", "--json")
    assert outcome.code == 0
    written = read_toml(tmp_path / "a" / "experiment.toml")
    expected = {"rounds": 1, "clients": 4, "method": "fedprox(mu=0.5)", "batch_size": 16, "seed": 0}
    assert {key: written[key] for key in expected} == expected
    assert written["optimiser"] == "sgd(learning_rate=0.01, momentum=0.9)"


def test_an_option_equal_to_the_default_still_counts(call: Call, tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(
        "batch_size = 16\nmodel = 'mlp(hidden=8)'\nclients = 2\nepochs = 1\ndeterministic = true\n"
    )
    call(
        "run",
        "experiment.toml",
        "--batch-size",
        "32",
        "--rounds",
        "1",
        "--no-deterministic",
        "--out",
        "a",
        "--no-report",
    )
    written = read_toml(tmp_path / "a" / "experiment.toml")
    assert (written["batch_size"], written["deterministic"]) == (32, False)


def test_a_run_folder_is_the_input_for_the_same_run(call: Call) -> None:
    first = call("run", *TINY, "--rounds", "1", "--out", "a", "--no-report", "--json").json
    again = call("run", "a/experiment.toml", "--out", "b", "--no-report", "--json").json
    assert first["final"] == again["final"]


def test_a_finished_run_is_neither_overwritten_nor_resumed(call: Call, tmp_path: Path) -> None:
    assert call("run", *TINY, "--rounds", "1", "--out", "a", "--no-report").code == 0
    before = (tmp_path / "a" / "summary.json").read_bytes()
    assert "already holds a finished run" in call("run", *TINY, "--rounds", "1", "--out", "a").sentence
    assert "finished already" in call("resume", "a").sentence
    assert (tmp_path / "a" / "summary.json").read_bytes() == before


def test_resume_ends_as_if_there_had_been_no_interruption(call: Call) -> None:
    def interrupt(update: RoundView) -> None:
        if update.round == 3:
            raise KeyboardInterrupt

    whole = call("run", *TINY, "--rounds", "4", "--out", "whole", "--no-report", "--json").json
    experiment = Experiment.read(Path("whole/experiment.toml")).with_changes({"checkpoint_every": 1})
    with pytest.raises(KeyboardInterrupt):
        api.run(experiment, out="broken", callbacks=[interrupt])
    resumed = call("resume", "broken", "--json", "--no-report")
    assert resumed.code == 0
    assert resumed.json["final"] == whole["final"]


def test_the_default_folder_is_named_after_the_experiment_and_never_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = Experiment(method="fedbn+fedprox(mu=0.01)", data="image_folder(path='a b/c')", seed=3)
    first = unused_folder(experiment)
    assert first == Path("runs/fedbn+fedprox-mu=0.01-image_folder-path=-a-b-c-seed3")
    first.mkdir(parents=True)
    assert unused_folder(experiment) == first.with_name(first.name + "-2")


def test_compare_makes_a_table_and_does_not_repeat_what_is_done(call: Call, tmp_path: Path) -> None:
    arguments = ("compare", "fedavg, local", *TINY, "--rounds", "2", "--out", "c")
    first = call(*arguments, "--no-report", "--json")
    assert first.code == 0
    assert [row["method"] for row in first.json["methods"]] == ["fedavg", "local"]
    assert first.json["runs"] == ["c/fedavg-seed0", "c/local-seed0"]
    assert (first.json["out"], first.json["failed"]) == ("c", {})
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("c/*/summary.json")}
    second = call(*arguments, "--seeds", "2")
    assert second.code == 0
    assert "2 of 4 runs are finished already" in second.err
    assert "±" in second.out
    assert "paired t-test" in second.out
    assert "c/report.html" in second.out
    assert (tmp_path / "c/report.html").exists()
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_compare_refuses_to_mix_experiments(call: Call) -> None:
    assert call("compare", "fedavg", *TINY, "--rounds", "1", "--out", "c", "--no-report").code == 0
    sentence = call("compare", "fedavg, local", *TINY, "--rounds", "2", "--out", "c").sentence
    assert "rounds is 1 there, not 2" in sentence


def test_compare_puts_no_runs_into_the_folder_of_a_run(call: Call, tmp_path: Path) -> None:
    assert call("run", *TINY, "--rounds", "1", "--out", "runs/compare", "--quiet").code == 0
    page = Path("runs/compare/report.html").read_bytes()
    sentence = call("compare", "fedavg", *TINY, "--rounds", "1", "--out", "runs/compare").sentence
    assert sentence == "'runs/compare' is the folder of one run; name another one with --out."
    assert call("compare", "fedavg", *TINY, "--rounds", "1", "--quiet").code == 0
    assert list(tmp_path.glob("runs/*/fedavg-seed0")) == [tmp_path / "runs/compare-2/fedavg-seed0"]
    assert Path("runs/compare/report.html").read_bytes() == page


def test_without_a_folder_compare_goes_on_with_the_same_experiment_or_takes_a_new_one(
    call: Call, tmp_path: Path
) -> None:
    for rounds in ("1", "2", "1"):
        assert call("compare", "fedavg", *TINY, "--rounds", rounds, "--no-report").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["compare", "compare-2"]


@pytest.mark.parametrize("jobs", ["0", "two"])
def test_compare_takes_a_number_of_runs_at_a_time(call: Call, tmp_path: Path, jobs: str) -> None:
    sentence = call("compare", "fedavg, local", *TINY, "--rounds", "1", "--jobs", jobs).sentence
    assert sentence == f"'{jobs}' is no number of runs at a time; give a whole number from 1 on, or 'auto'."
    assert not (tmp_path / "runs").exists()
    assert "--jobs N|auto" in call("compare", "--help").out


def test_compare_finds_a_bad_method_before_anything_runs(call: Call, tmp_path: Path) -> None:
    assert "Did you mean 'fedprox'?" in call("compare", "local, fedprx", *TINY, "--rounds", "1").sentence
    assert list(tmp_path.iterdir()) == []


def test_report_keeps_to_the_order_of_a_comparison_or_takes_another_reference(call: Call) -> None:
    def methods(*arguments: str) -> list[str]:
        told = call("report", "c", "--json", *arguments).json
        page = Path("c/report.html").read_text()
        assert f"Against {told['methods'][0]['method']}" in page
        return [row["method"] for row in told["methods"]]

    short = (*TINY, "--rounds", "1", "--out", "c", "--quiet")
    assert call("compare", "local, fedprox, fedavg", *short).code == 0
    assert methods() == ["local", "fedprox", "fedavg"]
    assert methods("--reference", "fedavg") == ["fedavg", "local", "fedprox"]
    assert "Did you mean 'fedavg'?" in call("report", "c", "--reference", "fedagv").sentence
    assert call("compare", "fedprox, local", *short).code == 0
    assert methods() == ["fedprox", "local", "fedavg"]
    Path("c/order.json").unlink()  # as in folders of earlier versions
    assert methods() == ["local", "fedprox", "fedavg"]


def test_where_nothing_is_measured_a_sentence_says_so(call: Call) -> None:
    Path("t.csv").write_text("a,label\n" + "".join(f"{row / 7},{row % 2}\n" for row in range(60)))
    table = ("--data", "table(path=t.csv, label=label, test_fraction=0)", *TINY, "--rounds", "1")
    said = "No client has test samples, so nothing was measured."
    for outcome in (call("run", *table, "--out", "a"), call("compare", "fedavg, local", *table, "--out", "b")):
        assert said in outcome.out
        assert "std over" not in outcome.out
        assert "Accuracies in percent" not in outcome.out


def test_a_report_is_a_page_and_no_picture(call: Call) -> None:
    call("run", *TINY, "--rounds", "1", "--out", "a", "--quiet")
    sentence = call("report", "a", "-o", "x.pdf").sentence
    assert "cannot be written to 'x.pdf'; name a file that ends in .html" in sentence
    assert "--figures DIR" in sentence
    assert not Path("x.pdf").exists()


def test_report_takes_runs_and_folders_of_runs(call: Call, tmp_path: Path) -> None:
    call("compare", "fedavg, local", *TINY, "--rounds", "1", "--out", "c", "--no-report")
    outcome = call("report", "c", "-o", "page.html", "--title", "All of them")
    assert outcome.code == 0
    assert "fedavg" in outcome.out
    assert "All of them" in (tmp_path / "page.html").read_text()
    assert run_folders([Path("c/local-seed0"), Path("c")]) == [Path("c/local-seed0"), Path("c/fedavg-seed0")]
    Path("c/report.html").touch()
    assert run_folders(sorted(Path("c").glob("*"))) == [Path("c/fedavg-seed0"), Path("c/local-seed0")]
    assert run_folders([Path("c/report.html")]) == [Path("c/report.html")]
    beside = call("diff", "c/fedavg-seed0", "c/local-seed0")
    assert beside.code == 0
    assert re.search(r"method +fedavg +local", beside.out)
    assert re.search(r"Bytes up, whole run .* 0 B +−", beside.out)
    told = call("diff", "c/fedavg-seed0", "c/local-seed0", "--json").json
    assert (told["first"], told["second"], list(told["settings"])) == ("fedavg", "local", ["method"])
    up = told["numbers"]["bytes_up"]
    assert up["difference"] == -up["first"]["mean"] < 0 == up["second"]["mean"]
    refused = call("diff", "c", "c/local-seed0")
    assert refused.code == 2
    assert "'c' holds 2 methods (fedavg, local), and a side is one" in refused.sentence
    assert call("diff", "c/local-seed0", "c/local-seed0", "--json").json["first"] == "c/local-seed0"


def test_report_and_diff_tell_which_runs_are_not_finished(call: Call) -> None:
    def stop(view: RoundView) -> None:
        if view.round == 2:
            raise KeyboardInterrupt

    experiment = Experiment(model="mlp(hidden=8)", clients=4, epochs=1, rounds=3, engine="stacked")
    with pytest.raises(KeyboardInterrupt):
        api.run(experiment, out="runs/half", callbacks=[stop])
    api.run(experiment.with_changes({"method": "local"}), out="runs/whole")
    told = "half is not finished: its numbers are those after round 1 of 3."
    for command in (("report", "runs", "-o", "page.html"), ("diff", "runs/half", "runs/whole")):
        outcome = call(*command)
        assert " ".join(outcome.out.split()).count(told) == 1
        assert "whole is not" not in outcome.out
        assert call(*command, "--json").json["notes"].count(told) == 1
    assert told in Path("page.html").read_text()
    assert call("diff", "runs/whole", "runs/whole", "--json").json["notes"] == []


def test_the_next_command_has_the_settings_of_this_one() -> None:
    experiment = Experiment(method="fedbn", clients=5, partition="dirichlet(alpha=0.3, samples=40)", deterministic=True)
    assert next_command(experiment) == (
        "fedstrata compare 'fedavg, fedbn' --seeds 3 --clients 5 "
        "--partition 'dirichlet(alpha=0.3, samples=40)' --deterministic"
    )


def test_the_next_command_can_be_given_where_something_was_switched_off(call: Call) -> None:
    ended = call("run", *TINY, "--rounds", "1", "--no-replay", "--no-evaluate-trained", "--out", "r", "--no-report")
    [command] = [line.strip() for line in ended.out.splitlines() if "fedstrata compare" in line]
    words = shlex.split(command)[1:]
    assert {"--no-replay", "--no-evaluate-trained"} <= set(words)
    assert call(*words, "--seeds", "1", "--out", "c", "--no-report", "--quiet").code == 0
    assert "evaluate_trained = false" in Path("c/fedavg-seed0/experiment.toml").read_text()


def test_methods_of_a_comparison_may_stand_one_by_one_beside_a_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text('model = "mlp(hidden=8)"\nclients = 3\nrounds = 1\nepochs = 1\n')
    listed = call(
        "compare", "fedavg", "local,fedprox(mu=0.1)", "small.toml", "--out", "c", "--no-report", "--json"
    ).json
    assert [row["method"] for row in listed["methods"]] == ["fedavg", "local", "fedprox(mu=0.1)"]
    assert "clients = 3" in Path("c/local-seed0/experiment.toml").read_text()


def test_a_comparison_loads_its_data_once(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    original = Digits.load
    monkeypatch.setattr(Digits, "load", lambda self, root=None: loads.append(root) or original(self, root))
    arguments = ("compare", "fedavg, local", *TINY, "--rounds", "1", "--seeds", "2", "--no-report", "--quiet")
    assert call(*arguments).code == 0
    assert len(loads) == 1
    # Again, with runs there to be recognised, and another experiment in the folder that is looked at first.
    assert call(*arguments, "--rounds", "2").code == 0
    assert len(loads) == 2


def test_what_takes_long_is_told_on_standard_error(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: Digits, root: Path | None = None) -> Any:
        time.sleep(0.3)
        return original(self, root)

    original = Digits.load
    monkeypatch.setattr(Digits, "load", slow)
    monkeypatch.setattr("fedstrata.waiting.PATIENCE", 0.1)
    told = call("run", *TINY, "--rounds", "1", "--out", "a", "--json", "--no-report")
    assert told.json["rounds"] == 1
    assert "fedavg, seed 0: loading the data digits\n" in told.err
    assert "loading the data digits\n" in call("partition", "--json").err
    assert call("run", *TINY, "--rounds", "1", "--out", "b", "--quiet", "--no-report").err == ""


def test_an_imported_callback_ends_a_run_which_says_so(call: Call, tmp_path: Path, fresh_imports: None) -> None:
    (tmp_path / "enough.py").write_text(
        "from fedstrata.callbacks import Callback, StopRun, callbacks\n\n"
        "@callbacks.register('enough')\n"
        "class Enough(Callback):\n"
        "    def on_evaluate(self, view):\n"
        "        print('looking')\n"
        "        if view.round == 2:\n"
        "            raise StopRun('two rounds are enough')\n"
    )
    assert call("run", *TINY, "--rounds", "5", "--import", "enough.py", "--out", "b", "--json").json["rounds"] == 2
    outcome = call("run", *TINY, "--rounds", "5", "--import", "enough.py", "--out", "a")
    assert (outcome.code, outcome.err.splitlines()[0]) == (0, "looking")
    assert "stopped after round 2 of 5: two rounds are enough" in outcome.out
    assert "was stopped after round 2 of 5: two rounds are enough." in Path("a/report.html").read_text()
