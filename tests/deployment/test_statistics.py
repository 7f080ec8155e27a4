"""The same words give the same numbers in simulation and at sites: by what samples are normalised."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from direct_network import DirectNetwork, Tamper, honest
from small_world import EXPERIMENT, request

import fedstrata
from fedstrata.data import Dataset
from fedstrata.data.channels import ChannelSums, Statistics, channel_statistics
from fedstrata.deployment.begun import DEPLOYMENT_FILE
from fedstrata.deployment.facts import statistics_from_facts
from fedstrata.deployment.protocol import OK, REFUSED, UNREADY, Place, ProtocolError, Reply, Request
from fedstrata.deployment.rules import Rules, SiteRules
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.deployment.statistics import from_pieces, sums_from_facts, to_pieces
from fedstrata.engines.planning import Plan
from fedstrata.errors import FedStrataError
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.models import load_model
from fedstrata.runs.preparing import Ingredients

NAMES = ["berlin", "paris", "rome"]
TABLE = EXPERIMENT.with_changes({"model": "mlp(hidden=8)", "method": "fedavg"})
PUBLISHED = Statistics((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


def hospital(number: int, samples: int) -> tuple[torch.Tensor, list[int]]:
    """Patients whose values lie elsewhere in every hospital: its own statistics are not those of all."""
    chance = np.random.default_rng(number)
    values = chance.normal([50 + 10 * number, 200, 0.1], [5 + number, 30, 0.01], (samples, 3))
    return torch.from_numpy(values).float(), [0, 1] * (samples // 2)


HOSPITALS = {name: hospital(number, 20 + 8 * number) for number, name in enumerate(NAMES)}


def own_data(number: int) -> Dataset:
    return fedstrata.from_arrays(*HOSPITALS[NAMES[number]], name="table")


class Hospitals(DirectNetwork):
    """Sites of which each holds its own patients, and nobody else's."""

    def __init__(
        self,
        folder: Path,
        tamper: Tamper = honest,
        rules: dict[int, SiteRules] | None = None,
        data: dict[int, Dataset] | None = None,
    ) -> None:
        self.rules, self.data = rules or {}, data or {}
        super().__init__(folder, len(NAMES), tamper)

    def start(self, number: int) -> Site:
        own = Ingredients(dataset=self.data.get(number) or own_data(number), secret=False)
        data = SiteData(ingredients=own)
        return Site(self.folder / f"site-{number}", data, self.lines[number].append, rules=self.rules.get(number))

    def dataset(self, number: int) -> Dataset:
        member = self.sites[number]._member
        assert member is not None
        return member.ready.dataset


def simulated(**changes: Any) -> Driver:
    data, split = fedstrata.from_clients(HOSPITALS, name="table")
    experiment = TABLE.with_changes(changes)
    simulation = Driver.prepare(experiment, Ingredients(dataset=data, split=split, secret=False), Plan("loop", 1))
    simulation.run()
    return simulation


def deployed(
    folder: Path, network: Hospitals, rules: Rules | None = None, log: list[str] | None = None, **changes: Any
) -> RunFolder:
    deployment = Deployment(TABLE.with_changes(changes), NAMES, folder / "run", rules or Rules())
    deployment.run(network, log=lambda line: None if log is None else log.append(line))
    return RunFolder.open(folder / "run")


def assert_same(folder: RunFolder, simulation: Driver) -> None:
    for name, tensor in folder.model().items():
        assert torch.equal(tensor, simulation.model[name]), name
    accuracy = folder.metrics().series("client_after.accuracy.mean")[1]
    assert accuracy.tolist() == simulation.metrics.series("client_after.accuracy.mean")[1].tolist()


# The numbers ----------------------------------------------------------------------------------------------------------


def test_sums_by_hand():
    sums = ChannelSums.of(torch.tensor([[1.0, 5.0], [2.0, 5.0], [6.0, 5.0]]))
    assert sums is not None
    assert (sums.count, sums.numbers()) == (3, ([9.0, 15.0], [41.0, 75.0]))
    assert sums.statistics() == ((3.0, 5.0), (math.sqrt(14 / 3), 1.0))


def test_parts_add_up_to_the_whole_in_any_order():
    values = torch.from_numpy(np.random.default_rng(0).normal(1e3, 1e-3, (999, 4)))
    parts = [ChannelSums.of(part) for part in torch.split(values, [1, 400, 17, 581])]
    totals = {ChannelSums.total(part for part in order if part) for order in (parts, parts[::-1])}
    [total] = totals
    assert total.count == 999
    assert total.statistics().mean == pytest.approx(values.mean(0).tolist(), rel=1e-14)
    assert total.statistics().deviation == pytest.approx(values.std(0, correction=0).tolist(), rel=1e-3)


def test_what_hardly_changes_counts_as_constant():
    assert channel_statistics(torch.full((7, 1), 0.1))[1] == (1.0,)
    assert channel_statistics(torch.zeros(7, 1))[1] == (1.0,)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sites", [3, 100])
def test_pieces_of_sums_add_up_exactly(bits, sites):
    rules, chance = Rules(secure=True, secure_bits=bits), np.random.default_rng(0)
    own = [ChannelSums.of(torch.from_numpy(chance.normal(-3, 1e4, (9, 2)))) for _ in range(sites)]
    pieces = [to_pieces(one, rules, sites).tensors["statistics"].flatten().numpy() for one in own if one]
    whole = np.sum([np.append(one, 0).astype(np.int64) for one in pieces], axis=0)
    assert whole.max() <= sites * rules.largest_number(sites)
    total = ChannelSums.total(one for one in own if one)
    assert from_pieces(whole.astype(f"<u{bits // 8}"), rules, sites, 2) == total


# In simulation and at sites -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transforms",
    ["normalise", "normalise:site", "normalise(mean='60 200 0.1', deviation='9 30 0.5')", "none"],
)
def test_three_rounds_equal_those_of_the_simulation(transforms, tmp_path):
    network = Hospitals(tmp_path)
    assert_same(deployed(tmp_path, network, transforms=transforms), simulated(transforms=transforms))
    asked = {asked.kind for _, asked in network.sent}
    assert ("statistics" in asked) == (transforms == "normalise")


def test_these_ways_to_normalise_differ():
    """Or the test above would prove nothing."""
    models = [simulated(transforms=transforms).model for transforms in ("normalise", "normalise:site", "none")]
    assert not any(torch.equal(models[0][name], other[name]) for other in models[1:] for name in other)


def test_sites_end_with_the_statistics_of_all_or_with_their_own(tmp_path):
    pooled = torch.cat([own_data(number).inputs[own_data(number).train] for number in range(3)]).double()
    network = Hospitals(tmp_path / "a")
    deployed(tmp_path / "a", network)
    for number in range(3):
        assert network.dataset(number).mean == pytest.approx(pooled.mean(0).tolist(), rel=1e-12)
        assert network.dataset(number).deviation == pytest.approx(pooled.std(0, correction=0).tolist(), rel=1e-9)
    network = Hospitals(tmp_path / "b")
    deployed(tmp_path / "b", network, transforms="normalise:site")
    for number in range(3):
        own = own_data(number)
        assert network.dataset(number).mean == own.mean == channel_statistics(own.inputs[own.train])[0]


def test_the_server_keeps_them_and_tells_what_travelled(tmp_path):
    log: list[str] = []
    network = Hospitals(tmp_path)
    deployed(tmp_path, network, log=log)
    kept = json.loads((tmp_path / "run" / DEPLOYMENT_FILE).read_text())["statistics"]
    assert kept["mean"] == list(network.dataset(0).mean or ())
    assert any("samples of 3 of 3 sites" in line and "bytes" in line for line in log)


@pytest.mark.parametrize("transforms", ["normalise", "normalise:site"])
def test_models_know_by_what_to_normalise(transforms, tmp_path):
    """The model of a client, from memory, from the run folder, and from the site, tells the accuracy that it had."""
    data, split = fedstrata.from_clients(HOSPITALS, name="table")
    settings = {**TABLE.to_mapping(), "transforms": transforms, "data": (data, split)}
    result = fedstrata.run(**settings, out=tmp_path / "here")
    network = Hospitals(tmp_path)
    deployed(tmp_path, network, transforms=transforms)
    for number in range(3):
        folder = network.sites[number].model_folder
        assert folder is not None
        models = [result.client_model(number), load_model(tmp_path / "here", number), load_model(folder)]
        expected = network.dataset(number)
        for model in models:
            [step] = model.card.preprocessing
            assert (tuple(step["mean"]), tuple(step["deviation"])) == (expected.mean, expected.deviation)
            right = [data.class_names[label] for label in data.labels[split.test[number]]]
            reached = (model.predict(data.inputs[split.test[number]]) == right).mean()
            assert reached == pytest.approx(model.card.metrics["accuracy"])


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_each_client_by_its_own_in_both_engines(engine):
    data, split = fedstrata.from_clients(HOSPITALS)
    experiment = TABLE.with_changes({"transforms": "normalise:site"})
    simulation = Driver.prepare(
        experiment, Ingredients(dataset=data, split=split), Plan(engine, 1 if engine == "loop" else 3)
    )
    simulation.run()
    other = simulated(transforms="normalise:site")
    for name, tensor in simulation.model.items():
        assert torch.allclose(tensor, other.model[name], atol=1e-5), name
    assert "global.accuracy" not in simulation.metrics.latest(), "no statistics are those of everybody's test samples"


# What a site lets leave -----------------------------------------------------------------------------------------------


def test_a_site_may_give_no_sums_and_the_others_statistics_hold(tmp_path):
    log: list[str] = []
    network = Hospitals(tmp_path, rules={1: SiteRules(statistics=False), 2: SiteRules(min_samples=1000)})
    deployed(tmp_path, network, log=log)
    assert network.dataset(1).mean == network.dataset(2).mean == own_data(0).mean
    assert any("paris refuses" in line and "--no-statistics" in line for line in log)
    assert any("rome refuses" in line and "fewer than 1000" in line for line in log)
    assert any("samples of 1 of 3 sites" in line for line in log)


def test_where_nobody_gives_sums_other_ways_are_named(tmp_path):
    network = Hospitals(tmp_path, rules=dict.fromkeys(range(3), SiteRules(statistics=False)))
    with pytest.raises(FedStrataError, match=r"Too few sites give the sums .* 'normalise:site"):
        deployed(tmp_path, network)
    assert not (tmp_path / "run" / "experiment.toml").exists()


@pytest.mark.parametrize("method", ["central-dp", "local-dp"])
def test_under_a_promise_of_privacy_no_sums_leave(method, tmp_path):
    deployment = Deployment(TABLE.with_changes({"method": method}), NAMES, tmp_path / "run")
    with pytest.raises(FedStrataError, match=rf"'{method}' keeps an account .* 'normalise:site.*imagenet.*mean="):
        deployment.check()
    for changes in ({"transforms": "normalise:site"}, {"data": "cifar10"}):
        replace(deployment, experiment=deployment.experiment.with_changes(changes)).check()
    network = Hospitals(tmp_path)
    with pytest.raises(FedStrataError, match="keeps an account"):  # the sites' data has no constants after all
        deployed(tmp_path, network, method=method, data="cifar10")
    assert "statistics" not in {asked.kind for _, asked in network.sent}


# Tables ---------------------------------------------------------------------------------------------------------------


def table_of(number: int, sexes: tuple[str, str] = ("f", "m")) -> Dataset:
    values, labels = HOSPITALS[NAMES[number]]
    rows = {
        "age": [round(value, 1) for value in values[:, 0].tolist()],
        "sex": [sexes[index % 3 == 0] for index in range(len(labels))],
        "ill": ["yes" if label else "no" for label in labels],
    }
    return fedstrata.from_table(rows, label="ill", name="table")


def test_of_a_table_only_quantities_are_normalised(tmp_path):
    tables = {number: table_of(number) for number in range(3)}
    network = Hospitals(tmp_path, data=tables)
    deployed(tmp_path, network)
    ages = torch.cat([table.inputs[table.train, 0] for table in tables.values()]).double()
    for number in range(3):
        mean, deviation = network.dataset(number).mean, network.dataset(number).deviation
        assert mean == (pytest.approx(float(ages.mean())), 0.0, 0.0)
        assert deviation == (pytest.approx(float(ages.std(correction=0))), 1.0, 1.0)


def test_tables_with_other_categories_are_refused(tmp_path):
    log: list[str] = []
    data = {0: table_of(0), 1: table_of(1), 2: table_of(2, ("f", "x"))}
    deployed(tmp_path, Hospitals(tmp_path, data=data), Rules(max_refusals=1), log)
    assert any("rome" in line and "other columns or categories" in line and "encoding=" in line for line in log)


# Published constants --------------------------------------------------------------------------------------------------


def published(number: int, statistics: Statistics) -> Dataset:
    own = own_data(number)
    return replace(own, mean=statistics.mean, deviation=statistics.deviation, estimated=False)


def test_constants_need_no_exchange_where_all_sites_have_the_same(tmp_path):
    network = Hospitals(tmp_path, data={number: published(number, PUBLISHED) for number in range(3)})
    folder = deployed(tmp_path, network)
    assert "statistics" not in {asked.kind for _, asked in network.sent}
    assert network.dataset(2).mean == PUBLISHED.mean
    same = simulated(transforms="normalise(mean='1 2 3', deviation='4 5 6')")
    assert_same(folder, same)


def test_a_site_with_other_constants_is_refused_by_name(tmp_path):
    other = Statistics(PUBLISHED.mean, (1.0, 1.0, 1.0))
    data = {0: published(0, PUBLISHED), 1: published(1, PUBLISHED), 2: published(2, other)}
    log: list[str] = []
    deployed(tmp_path, Hospitals(tmp_path, data=data), Rules(max_refusals=1), log)
    assert any("rome" in line and "normalised by the constants" in line and "normalise:site" in line for line in log)


# Secure aggregation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 32])
def test_under_masks_the_same_numbers_to_the_last_bit(bits, tmp_path):
    pytest.importorskip("cryptography")
    seen: list[dict[str, Any]] = []

    def tamper(site: int, asked: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if asked.kind == "statistics":
            seen.append(dict(reply.facts))
        return [(0.1, reply)]

    network = Hospitals(tmp_path, tamper)
    deployed(tmp_path, network, Rules(secure=True, secure_bits=bits), rounds=1)
    [statistics] = {(network.dataset(number).mean, network.dataset(number).deviation) for number in range(3)}
    clear = simulated(rounds=1).dataset
    assert statistics == (clear.mean, clear.deviation)
    assert seen == [{}, {}, {}], "no sums in the clear"


def test_a_sum_of_two_hides_too_little(tmp_path):
    pytest.importorskip("cryptography")
    network = Hospitals(tmp_path, rules={1: SiteRules(statistics=False)})
    with pytest.raises(FedStrataError, match="A sum of 2 sites hides too little"):
        deployed(tmp_path, network, Rules(secure=True))


# Restarts -------------------------------------------------------------------------------------------------------------


def test_a_restarted_site_and_a_restarted_server_change_nothing(tmp_path):
    class Killed(Exception):  # noqa: N818
        pass

    def tamper(site: int, asked: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if asked.kind == "train" and asked.round == 2 and site == 2:
            raise Killed
        return [(0.1, reply)]

    with pytest.raises(Killed):
        deployed(tmp_path, Hospitals(tmp_path, tamper))
    network = Hospitals(tmp_path)
    folder = deployed(tmp_path, network)
    assert "statistics" not in {asked.kind for _, asked in network.sent}
    assert_same(folder, simulated())


def greeted(folder: Path, statistics: dict[str, list[float]] | None, site: Site | None = None) -> tuple[Site, Reply]:
    site = site or Site(folder, SiteData(ingredients=Ingredients(dataset=own_data(0), secret=False)))
    facts = {
        "experiment": TABLE.to_mapping(), "number": 0, "sites": 3, "session": "one", "committed": 0,
        "statistics": statistics,
    }  # fmt: skip
    return site, site.answer(Request("hello", "run", facts=facts))


GIVEN = {"mean": [1.0, 2.0, 3.0], "deviation": [1.0, 1.0, 1.0]}


def test_a_site_does_nothing_before_it_knows_by_what_to_normalise(tmp_path):
    site, reply = greeted(tmp_path, None)
    assert reply.facts["normalises_by"] == "sums"
    assert site.answer(request("train", Place.training(1), b"model")).status == UNREADY
    assert site.answer(Request("statistics", "run")).facts["count"] == 14
    greeted(tmp_path, GIVEN, site)
    assert site.answer(request("train", Place.training(1), b"model")).status == REFUSED
    again = site.answer(Request("statistics", "run"))
    assert (again.status, "once" in again.reason) == (REFUSED, True)


def test_what_was_agreed_cannot_change(tmp_path):
    _, reply = greeted(tmp_path, GIVEN)
    assert reply.status == OK
    for changed in (None, {**GIVEN, "mean": [0.0, 2.0, 3.0]}):
        _, reply = greeted(tmp_path, changed)
        assert "cannot change" in reply.reason


@pytest.mark.parametrize(
    "facts",
    [
        [], {}, {"mean": [1.0]}, {"mean": [1.0], "deviation": [0.0]}, {"mean": [1.0], "deviation": [1.0, 2.0]},
        {"mean": [math.inf], "deviation": [1.0]}, {"mean": ["1"], "deviation": [1.0]}, "sums",
    ],
)  # fmt: skip
def test_impossible_statistics_are_refused(facts):
    with pytest.raises(ProtocolError):
        statistics_from_facts(facts)


@pytest.mark.parametrize(
    "change",
    [
        {"count": 0}, {"count": 2.0}, {"count": True}, {"sums": [1.0]}, {"sums": [math.nan, 1.0]}, {"squares": None},
        {"squares": [-1.0, 1.0]}, {"sums": [100.0, 1.0]}, {"sums": ["1", 1.0]}, {"squares": [1e200, 1.0]},
    ],
)  # fmt: skip
def test_impossible_sums_are_refused(change):
    facts = {"count": 2, "sums": [1.0, 1.0], "squares": [1.0, 1.0]}
    assert sums_from_facts(facts, 2).count == 2
    with pytest.raises(FedStrataError):
        sums_from_facts({**facts, **change}, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("normalise(mean='1')", "both"),
        ("normalise(mean='1', deviation='0')", "above 0"),
        ("normalise(mean='a', deviation='1')", "one number, or one for each"),
        ("normalise(imagenet, mean='1', deviation='1')", "not both"),
        ("normalise(mean='1 2', deviation='1')", "have 3 channels"),
    ],
)
def test_odd_constants_are_refused(text, words):
    with pytest.raises(FedStrataError, match=words):
        simulated(transforms=text)


def test_samples_of_the_server_have_no_owner_whose_statistics_they_could_take():
    with pytest.raises(FedStrataError, match="belong to no client"):
        simulated(method="fedlaw", transforms="normalise:site")
    with pytest.raises(FedStrataError, match="by statistics of their own"):
        Driver.prepare(EXPERIMENT.with_changes({"transforms": "normalise:site", "validation": 50}))
