from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from federations import CPU, federation, samples, split_by_size
from torch import nn

from fedstrata.engines import probe as probing
from fedstrata.engines.batches import DeviceData
from fedstrata.engines.forward import LoopForward, StackedForward
from fedstrata.engines.probe import DataProbe
from fedstrata.engines.training import Trainer
from fedstrata.methods import Clients

ENGINES = pytest.mark.parametrize("engine", [LoopForward, StackedForward])
SIZES = (4, 8, 6, 4)


class RecordingData(DeviceData):
    """Notes which samples are used, batch by batch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.used = []

    def make(self, positions, keys, step=0, clients=None):
        self.used.append(positions.tolist())
        return super().make(positions, keys, step)


def world(sizes=SIZES, labels=None, **changes):
    """A model with a norm whose batches matter, and data that notes how it is used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    dataset, split = samples(sum(sizes), labels=labels), split_by_size(sizes)
    made = federation(model, dataset, split, **changes)
    made.data = RecordingData(dataset, split, (), CPU, torch.float64)
    return made


def probe(made, engine, ids, round=1):
    setting, rows = made.setting, list(ids)
    sizes = torch.from_numpy(made.data.split.sizes)[rows]
    counts = made.data.label_counts[rows]
    clients = Clients(round, 3, 1, setting.layers, tuple(ids), setting.seed, sizes, counts, setting.shared)
    return DataProbe(Trainer(setting, engine(made.model, head=setting.head), made.data), clients)


def own_models(made, count):
    """Give every client a model of its own."""
    chance = torch.Generator().manual_seed(1)
    return {
        name: torch.stack(
            [tensor + 0.1 * torch.rand(tensor.shape, generator=chance, dtype=torch.float64) for _ in range(count)]
        )
        if tensor.is_floating_point()
        else tensor.expand(count)
        for name, tensor in made.setting.initial.items()
    }


def plain_gradients(made, model, row, batches):
    """Compute the mean gradient of some batches in plain PyTorch."""
    module = made.model.train()
    module.load_state_dict({name: tensor[row] for name, tensor in model.items()})
    total = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    for positions in batches:
        loss = F.cross_entropy(module(made.data.inputs[positions]), made.data.labels[positions])
        for name, gradient in zip(total, torch.autograd.grad(loss, list(module.parameters())), strict=True):
            total[name] += gradient / len(batches)
    return total


def assert_rows(stack, row, expected):
    assert stack.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(stack[name][row], tensor, rtol=1e-10, atol=1e-12), name


@ENGINES
def test_a_batch_larger_than_the_data_gives_the_full_gradient(engine):
    made = world()
    model = own_models(made, 4)
    gradients = probe(made, engine, range(4)).gradients(model, 100)
    begin = 0
    for row, size in enumerate(SIZES):
        assert_rows(gradients, row, plain_gradients(made, model, row, [list(range(begin, begin + size))]))
        begin += size


@ENGINES
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("batch_size", [2, 4])
def test_gradients_are_those_of_plain_pytorch_on_the_same_samples(engine, batch_size, balanced):
    """Clients of unequal size together; the samples are those that each would have used alone."""
    made = world()
    model = own_models(made, 4)
    together = probe(made, engine, range(4)).gradients(model, batch_size, balanced=balanced)
    for row in range(4):
        made.data.used.clear()
        alone = {name: tensor[row : row + 1] for name, tensor in model.items()}
        gradients = probe(made, engine, [row]).gradients(alone, batch_size, balanced=balanced)
        used = [positions for [positions] in made.data.used]
        assert len(used) == 1
        assert {position for positions in used for position in positions} <= set(made.data.split.train[row])
        expected = plain_gradients(made, model, row, used)
        assert_rows(gradients, 0, expected)
        assert_rows(together, row, expected)


@ENGINES
def test_rounds_draw_other_samples_and_nothing_is_kept(engine):
    made = world()
    model = own_models(made, 4)
    before = {name: tensor.clone() for name, tensor in model.items()}
    batches = []
    for round in (1, 2, 1):
        made.data.used.clear()
        probe(made, engine, range(4), round).gradients(model, 2)
        batches.append(list(made.data.used))
    assert batches[0] == batches[2] != batches[1]
    assert all(torch.equal(model[name], before[name]) for name in model)


@ENGINES
def test_another_draw_takes_other_samples_which_repeat(engine):
    """By itself each is a draw of the client's own samples, and its gradients are those of plain PyTorch on them."""
    made = world()
    model = own_models(made, 4)
    drawn, gradients = {}, {}
    for name, more in (("none", {}), ("first", {"draw": 0}), ("second", {"draw": 1}), ("again", {"draw": 1})):
        made.data.used.clear()
        gradients[name] = probe(made, engine, range(4)).gradients(model, 2, **more)
        drawn[name] = list(made.data.used)
    assert drawn["none"] == drawn["first"] != drawn["second"] == drawn["again"]
    for row in range(4):
        made.data.used.clear()
        alone = {name: tensor[row : row + 1] for name, tensor in model.items()}
        probe(made, engine, [row]).gradients(alone, 2, draw=1)
        used = [positions for [positions] in made.data.used]
        assert {position for positions in used for position in positions} <= set(made.data.split.train[row])
        assert_rows(gradients["second"], row, plain_gradients(made, model, row, used))


# Features ------------------------------------------------------------------------------------------------------------


def plain_features(made, model, row):
    """Compute the mean inputs of the head for each class of a client in plain PyTorch, in evaluation mode."""
    module = made.model.eval()
    module.load_state_dict({name: tensor[row] for name, tensor in model.items()})
    means = torch.zeros(3, 5, dtype=torch.float64)
    with torch.no_grad():
        for label in range(3):
            own = [int(one) for one in made.data.split.train[row] if made.data.labels[one] == label]
            if own:
                means[label] = module[:-1](made.data.inputs[own]).mean(0)
    return means


@ENGINES
@pytest.mark.parametrize("at_once", [256, 3])
def test_features_are_the_mean_inputs_of_the_head_for_each_class(engine, at_once, monkeypatch):
    """In one go or batch by batch, with models of their own; a class that a client lacks has none."""
    monkeypatch.setattr(probing, "_SAMPLES_AT_ONCE", at_once)
    labels = [*[0, 0, 1, 0], *[2, 1, 0, 2, 2, 1, 1, 0], *[2] * 6, *[1, 2, 1, 1]]
    made = world(labels=labels)
    model = own_models(made, 4)
    before = {name: tensor.clone() for name, tensor in model.items()}
    found = probe(made, engine, range(4)).features(model)
    assert found.shape == (4, 3, 5)
    for row in range(4):
        assert torch.allclose(found[row], plain_features(made, model, row), rtol=1e-10, atol=1e-12)
        alone = {name: tensor[row : row + 1] for name, tensor in model.items()}
        assert torch.allclose(probe(made, engine, [row]).features(alone)[0], found[row], rtol=1e-10, atol=1e-12)
    has_none = (found == 0).all(2)
    assert has_none.tolist() == [
        [False, False, True], [False, False, False], [True, True, False], [True, False, False],
    ]  # fmt: skip
    assert all(torch.equal(model[name], before[name]) for name in model)


def test_features_use_each_sample_once_whatever_an_epoch_is():
    """Neither steps nor the last batch that training leaves out change that."""
    made = world(batch_size=4, last_batch="drop", steps=1)
    used = made.data.used
    probe(made, StackedForward, range(4)).features(own_models(made, 4))
    assert sorted(position for batch in used for rows in batch for position in rows) == list(range(sum(SIZES)))


def test_features_of_several_axes_are_flattened():
    """A head that works on the last axis of its inputs, here two places with five features each."""

    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x.view(-1, 2, 3)))).mean(1)

    torch.manual_seed(0)
    dataset, split = samples(12), split_by_size((5, 7))
    made = federation(Places().double(), dataset, split)
    model = own_models(made, 2)
    found = probe(made, StackedForward, range(2)).features(model)
    assert found.shape == (2, 3, 10)
    for row, own in enumerate((range(5), range(5, 12))):
        weight, bias = model["body.weight"][row], model["body.bias"][row]
        for label in range(3):
            inputs = made.data.inputs[[one for one in own if one % 3 == label]].view(-1, 2, 3)
            expected = torch.tanh(inputs @ weight.T + bias).mean(0).flatten()
            assert torch.allclose(found[row, label], expected, rtol=1e-10, atol=1e-12)


def test_balanced_batches_take_the_classes_in_turn():
    labels = [0, 0, 0, 0, 0, 1, 2, 2, *[1, 1], *[0, 1, 2, 0]]
    made = world((8, 2, 4), labels)
    model = own_models(made, 3)

    def drawn(client, batch_size):
        made.data.used.clear()
        alone = {name: tensor[client : client + 1] for name, tensor in model.items()}
        probe(made, LoopForward, [client]).gradients(alone, batch_size, balanced=True)
        [[positions]] = made.data.used
        return positions

    assert sorted(labels[position] for position in drawn(0, 3)) == [0, 1, 2]
    more = drawn(0, 6)
    assert sorted(labels[position] for position in more) == [0, 0, 0, 1, 2, 2]
    assert len(set(more)) == 6
    assert set(Counter(drawn(1, 6)).values()) == {3}
    assert sorted(labels[position] for position in drawn(2, 4)) == [0, 0, 1, 2]


@ENGINES
def test_training_for_a_survey_changes_nothing_but_its_result(engine):
    made = world(optimiser="sgd(learning_rate=0.1, momentum=0.9, keep=true)", batch_size=2)
    model = own_models(made, 4)
    before = {name: tensor.clone() for name, tensor in model.items()}
    trained = probe(made, engine, range(4)).train(model, epochs=1)
    again = probe(made, engine, range(4)).train(model, epochs=1)
    for name in model:
        assert torch.equal(model[name], before[name])
        assert torch.equal(trained[name], again[name])
    assert not torch.equal(trained["0.weight"], model["0.weight"])
    assert trained["1.num_batches_tracked"].tolist() == [2, 4, 3, 2]


def test_engines_agree_about_training_for_a_survey():
    made = world(optimiser="sgd(learning_rate=0.1, momentum=0.9)", batch_size=4)
    model = own_models(made, 4)
    loop, stacked = (probe(made, engine, range(4)).train(model, epochs=2) for engine in (LoopForward, StackedForward))
    for name in loop:
        assert torch.allclose(loop[name].double(), stacked[name].double(), rtol=1e-10, atol=1e-12)
