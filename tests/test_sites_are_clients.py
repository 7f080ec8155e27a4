"""Nobody's data is mixed unless that is asked for: where data has sites, they are the clients."""

import pytest
import torch

import fedstrata
from fedstrata import from_arrays
from fedstrata.data import partitions
from fedstrata.errors import FedStrataWarning
from fedstrata.runs.preparing import prepare

QUICK = {"model": "mlp", "rounds": 1, "epochs": 1, "method": "fedavg"}
HOSPITALS = {
    "north": (torch.randn(24, 4), [0, 1] * 12),
    "south": (torch.randn(40, 4), [0, 1] * 20),
}


def clients_of(**changes):
    return fedstrata.run(**QUICK, **changes).summary["clients"]


@pytest.mark.parametrize(
    "data",
    [HOSPITALS, fedstrata.from_clients(HOSPITALS), fedstrata.from_clients(HOSPITALS)[0]],
    ids=["dict", "tuple", "dataset"],
)
def test_hospitals_are_clients(data):
    assert clients_of(data=data) == 2


def test_their_samples_stay_with_them():
    data, split = fedstrata.from_clients(HOSPITALS)
    experiment = fedstrata.Experiment(model="mlp")
    divided = prepare(experiment, fedstrata.runs.preparing.Ingredients(dataset=data))
    assert divided.experiment.partition == "natural"
    for own, given in zip(divided.split.train, split.train, strict=True):
        assert sorted(own) == sorted(given)


def test_a_partition_by_name_mixes_them():
    data, _ = fedstrata.from_clients(HOSPITALS)
    assert clients_of(data=data, partition="iid", clients=5) == 5


def test_data_without_sites_is_divided_by_dirichlet():
    data = fedstrata.from_arrays(torch.randn(80, 4), [0, 1] * 40)
    divided = prepare(fedstrata.Experiment(model="mlp"), fedstrata.runs.preparing.Ingredients(dataset=data))
    assert (divided.experiment.partition, divided.split.clients) == ("dirichlet:0.1", 20)


DATA, SPLIT = fedstrata.from_clients(HOSPITALS)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"data": HOSPITALS, "clients": 7, "partition": "iid"},
            "clients = 7 and partition = 'iid' would .* leave them",
        ),
        ({"data": (DATA, SPLIT), "clients": 9}, "clients = 9 would have no effect: .* over 2 clients; leave it out"),
        ({"data": DATA, "split": SPLIT, "partition": "iid"}, "partition = 'iid' would have no effect: the data comes"),
        ({"data": DATA, "split": SPLIT, "partition": "python:0"}, "partition = 'python:0' would have no effect"),
    ],
)
def test_what_would_divide_them_otherwise_is_refused(given, said):
    with pytest.raises(fedstrata.FedStrataError, match=said):
        fedstrata.run(**QUICK, **given)
    compared = {key: value for key, value in QUICK.items() if key != "method"}
    with pytest.raises(fedstrata.FedStrataError, match=said):
        fedstrata.compare("fedavg, local", **compared, **given)


@pytest.mark.parametrize("sweep", ["clients=2, 7", "partition=iid, natural"])
def test_sweeps_that_would_change_nothing_are_refused(sweep):
    with pytest.raises(fedstrata.FedStrataError, match="would have no effect: the data comes with its split"):
        fedstrata.compare("fedavg", data=HOSPITALS, model="mlp", rounds=1, epochs=1, sweep=sweep)


def test_what_says_the_same_is_taken(tmp_path):
    assert clients_of(data=HOSPITALS, clients=2) == 2
    first = fedstrata.run(**QUICK, data=HOSPITALS, out=tmp_path / "run")
    assert fedstrata.run(first.experiment, data=HOSPITALS).split_hash == first.split_hash
    assert fedstrata.extend(tmp_path / "run", 2, data=HOSPITALS).summary["clients"] == 2


def test_a_run_goes_on_with_the_split_that_its_partition_gave(tmp_path):
    first = fedstrata.run(**QUICK, data=DATA, partition="iid", clients=3, out=tmp_path / "run")
    assert first.driver is not None
    same = first.driver.split
    assert fedstrata.extend(tmp_path / "run", 2, data=DATA, split=same).split_hash == first.split_hash
    with pytest.raises(fedstrata.FedStrataError, match="its split is not the same any more"):
        fedstrata.extend(tmp_path / "run", 3, data=DATA, split=SPLIT)


def test_sites_that_are_left_out_are_told_by_name_and_number():
    def told(sites, clients):
        names = [f"site-{site}" for site in range(sites) for _ in range(4)]
        data = from_arrays(torch.rand(len(names), 1), [0, 1] * (2 * sites), sites=names)
        with pytest.warns(FedStrataWarning) as caught:
            split = partitions.make("natural").split(data, clients)
        [one] = caught
        left_out = [name for name in dict.fromkeys(names) if name not in split.client_names(data)]
        return str(one.message).replace(", ".join(left_out[:3]), "NAMES")

    assert told(4, 3) == "3 of 4 sites were drawn to be clients; left out: NAMES. With 4 clients, all take part."
    assert told(2000, 15) == (
        "15 of 2,000 sites were drawn to be clients; left out: NAMES and 1,982 more. With 2,000 clients, all take part."
    )
