"""Nobody's data is mixed unless that is asked for: where data has sites, they are the clients."""

import pytest
import torch

import fedstrata
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
