from __future__ import annotations

import pytest

from fedstrata.data import datasets
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.functional import mask_error
from fedstrata.methods import Method
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients
from fedstrata.studies import mask_errors

EXPERIMENT = Experiment(data="digits", clients=6, model="mlp", precision="fp64", engine="loop", batch_size=8)


def found_mask(method):
    ingredients = Ingredients(dataset=datasets.make("digits").load(None), method=Method.make(method))
    simulation = Driver.prepare(EXPERIMENT, ingredients)
    simulation.engine.exchange(1)
    return {name: mask for name, mask in simulation.engine.server.memory.items() if "/mask/" in name}


def test_with_a_minibatch_from_each_client_it_is_the_error_of_ssfls_mask():
    errors = mask_errors([6], EXPERIMENT, sparsity=0.8, batch_size=5)
    mask, oracle = (found_mask(f"ssfl(sparsity=0.8, batch_size=5{more})") for more in ("", ", topology=oracle"))
    assert errors == {6: mask_error(mask, oracle)}


def test_more_minibatches_come_nearer_to_the_oracle():
    errors = mask_errors([1, 6, 60, 3], EXPERIMENT)
    assert list(errors) == [1, 3, 6, 60]
    assert 0.5 > errors[1] > errors[6] > errors[60] > 0


@pytest.mark.parametrize("numbers", [[], [0], [3, -1]])
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(FedStrataError, match="give some, each at least 1"):
        mask_errors(numbers, EXPERIMENT)
