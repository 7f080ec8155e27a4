"""Lies are for simulations: neither a server nor a site runs them on real data."""

from __future__ import annotations

import pytest
from small_world import hello, ingredients

from fedstrata.deployment.protocol import REFUSED
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment

REASON = "'attack' cannot run on real sites: it lets clients lie on purpose, to try methods out in simulation"


@pytest.mark.attack(
    "A server asks a site to train on false labels, by a method that is meant for simulations.",
    "The site refuses by itself, with the reason, whatever the server allows.",
)
def test_a_site_does_not_train_on_false_labels(tmp_path):
    site = Site(tmp_path, SiteData(part=0, ingredients=ingredients()))
    answer = site.answer(hello(method="attack(kind=label-flip)"))
    assert answer.status == REFUSED
    assert REASON in str(answer.facts)


def test_a_server_does_not_ask_for_lies(tmp_path):
    experiment = Experiment(method="fedavg+attack", data="digits", rounds=1, clients=3)
    with pytest.raises(FedStrataError, match=REASON):
        Deployment(experiment, ["a", "b", "c"], tmp_path, rehearsal=True).check()
