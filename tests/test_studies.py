from __future__ import annotations

import pytest
import torch
from torch import nn

from fedstrata.data import datasets
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.functional import mask_error
from fedstrata.methods import Method
from fedstrata.models import build_model
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients
from fedstrata.studies import mask_errors

EXPERIMENT = Experiment(data="digits", clients=6, model="mlp", precision="fp64", engine="loop", batch_size=8)


def found_mask(method, experiment=EXPERIMENT):
    ingredients = Ingredients(dataset=datasets.make("digits").load(None), method=Method.make(method))
    simulation = Driver.prepare(experiment, ingredients)
    simulation.engine.exchange(1)
    return {name: mask for name, mask in simulation.engine.server.memory.items() if "/mask/" in name}


def test_with_a_minibatch_from_each_client_it_is_the_error_of_ssfls_mask():
    errors = mask_errors([6], EXPERIMENT, sparsity=0.8, batch_size=5)
    mask, oracle = (found_mask(f"ssfl(sparsity=0.8, batch_size=5{more})") for more in ("", ", topology=oracle"))
    assert errors == {6: mask_error(mask, oracle)}


@pytest.mark.parametrize("batches", [1, 3])
def test_clients_of_all_sizes_count_by_their_data_and_all_minibatches_alike(batches):
    """With clients of 20 to 500 samples, a mask without weights would be another one."""
    experiment = EXPERIMENT.with_changes({"partition": "dirichlet-clients(alpha=0.5)"})
    errors = mask_errors([6 * batches], experiment, sparsity=0.8, batch_size=5)
    text = f"ssfl(sparsity=0.8, batch_size=5, batches={batches}"
    masks = {more: found_mask(f"{text}{more})", experiment) for more in ("", ", weighted=false")}
    oracle = found_mask("ssfl(sparsity=0.8, topology=oracle)", experiment)
    assert errors == {6 * batches: mask_error(masks[""], oracle)}
    assert mask_error(*masks.values()) > 0.01


@pytest.mark.parametrize(("clients", "scope"), [(1, "weights"), (3, "all")])
def test_by_hand_on_all_samples_of_clients_the_study_is_ten_lines_of_plain_pytorch(clients, scope):
    """A minibatch of all a client's samples leaves nothing to chance."""
    partition = "dirichlet-clients(alpha=0.5)"
    experiment = EXPERIMENT.with_changes({"clients": clients, "partition": partition})
    [error] = mask_errors([clients], experiment, sparsity=0.7, batch_size=9999, scope=scope).values()
    simulation = Driver.prepare(experiment)
    model = build_model("mlp", (1, 8, 8), 10, seed=0).double()
    model.load_state_dict(simulation.setting.initial)
    names = [name for name, tensor in model.named_parameters() if scope == "all" or tensor.dim() > 1]
    signed, scores = 0, 0
    for positions in simulation.split.train:
        inputs, labels = simulation.engine.evaluator.data.make(torch.from_numpy(positions)[None], None)
        loss = nn.functional.cross_entropy(model(inputs[0]), labels[0], reduction="sum")
        slopes = torch.autograd.grad(loss, [dict(model.named_parameters())[name] for name in names])
        product = torch.cat(
            [(slope * model.state_dict()[name]).flatten() for name, slope in zip(names, slopes, strict=True)]
        )
        signed, scores = signed + product, scores + product.abs()
    highest = [set(torch.topk(one, int(0.3 * len(one) + 1e-9)).indices.tolist()) for one in (signed.abs(), scores)]
    assert error == len(highest[0] ^ highest[1]) / len(scores)
    assert (error == 0) == (clients == 1)


def test_the_whole_training_set_has_no_error_where_there_is_one_client():
    experiment = EXPERIMENT.with_changes({"clients": 1})
    assert mask_errors([1], experiment, batch_size=9999) == {1: 0.0}
    assert mask_errors([1], experiment, batch_size=10)[1] > 0


def test_more_minibatches_come_nearer_to_the_oracle():
    errors = mask_errors([1, 6, 60, 3], EXPERIMENT)
    assert list(errors) == [1, 3, 6, 60]
    assert 0.5 > errors[1] > errors[6] > errors[60] > 0


@pytest.mark.parametrize("numbers", [[], [0], [3, -1]])
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(FedStrataError, match="give some, each at least 1"):
        mask_errors(numbers, EXPERIMENT)
