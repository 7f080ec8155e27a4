"""One small federation, twice: in plain PyTorch, for algorithms written as their papers print them, and as FedStrata
runs it.

The two share the initial model, the data and, where it matters, who takes part and which samples are drawn; nothing
else. Clients mostly train on all their samples at once, so that an epoch is a step and the order of samples does not
matter. Everything is in double precision, so that what agrees does so to 1e-9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call

from fedstrata import Dataset, Experiment, Split
from fedstrata.engines.batches import Work
from fedstrata.engines.planning import Plan
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients

ROUNDS, EPOCHS, RATE = 3, 4, 0.2
TWO_OF_THREE = 0.67
"""A participation by which two of three clients take part in a round."""
SIZES = (14, 25, 33)
LABELS = (range(0, 5), range(3, 8), range(6, 10))
"""How many samples each client has, and of which digits."""

Weights = dict[str, Tensor]


class Net(nn.Module):
    """Two convolutions with a norm each, and two linear layers; smooth, so that nothing hangs on rounding."""

    def __init__(self, norm: str = "group") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4) if norm == "batch" else nn.GroupNorm(2, 4)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(6) if norm == "batch" else nn.GroupNorm(2, 6)
        self.hidden = nn.Linear(24, 12)
        self.head = nn.Linear(12, 10)

    def features(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.norm1(self.conv1(x))), 2)
        x = F.avg_pool2d(torch.tanh(self.norm2(self.conv2(x))), 2)
        return torch.tanh(self.hidden(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Federation:
    """A common initial model, and clients of unequal size that see different digits."""

    def __init__(self, norm: str = "group") -> None:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(5)
            self.model = Net(norm).double()
            for parameter in self.model.parameters():  # norms too: at 1 and 0 much could be wrong with them unseen
                parameter.add_(0.1 * torch.randn_like(parameter))
        digits = load_digits()
        images, labels = torch.from_numpy(digits.images[:, None] / 16), torch.from_numpy(digits.target)
        owned = zip(SIZES, LABELS, strict=True)
        self.positions = [np.flatnonzero(np.isin(digits.target, chosen))[:size] for size, chosen in owned]
        train, test = np.unique(np.concatenate(self.positions)), [np.arange(1700, 1700 + size) for size in SIZES]
        self.dataset = Dataset("digits", images, labels, train, test[-1], tuple(map(str, digits.target_names)))
        self.split = Split(tuple(self.positions), tuple(test))
        self.data = [(images[own], labels[own]) for own in self.positions]
        self.test_data = [(images[own], labels[own]) for own in test]
        self.clients = range(len(SIZES))
        self.sizes = torch.tensor(SIZES, dtype=torch.float64)

    @property
    def initial(self) -> Weights:
        """A copy of the initial model, by name."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @property
    def initial_vector(self) -> Tensor:
        """A copy of the initial parameters, in one vector."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def named(self, vector: Tensor) -> Weights:
        """Cut a vector into the model's parameters."""
        parameters = dict(self.model.named_parameters())
        pieces = vector.split([parameter.numel() for parameter in parameters.values()])
        return {name: piece.view_as(parameters[name]) for name, piece in zip(parameters, pieces, strict=True)}

    def entries(self, *modules: str) -> Tensor:
        """Which entries of such a vector belong to some modules."""
        parameters = self.model.named_parameters()
        chosen = [torch.full((tensor.numel(),), name.split(".")[0] in modules) for name, tensor in parameters]
        return torch.cat(chosen)

    def loss(self, client: int, weights: Tensor) -> Tensor:
        """The mean cross-entropy of all samples of a client, as a function of the weights in one vector."""
        inputs, labels = self.data[client]
        return F.cross_entropy(functional_call(self.model, self.named(weights), (inputs,)), labels)

    def gradient(self, client: int, weights: Tensor) -> Tensor:
        """The gradient of that loss at some weights."""
        weights = weights.detach().requires_grad_()
        return torch.autograd.grad(self.loss(client, weights), weights)[0]

    def test_loss(self, client: int, weights: Mapping[str, Tensor]) -> float:
        """The mean cross-entropy of a client's test samples."""
        inputs, labels = self.test_data[client]
        model = deepcopy(self.model).eval()
        with torch.no_grad():
            return float(F.cross_entropy(functional_call(model, dict(weights), (inputs,)), labels))

    def run(self, method: str, **changes: Any) -> Outcome:
        """Let FedStrata run a method for three rounds."""
        experiment = Experiment(
            rounds=ROUNDS, epochs=EPOCHS, batch_size=1000, optimiser=f"sgd(learning_rate={RATE})", transforms="none",
            precision="fp64", device="cpu", seed=3, method=method,
        ).with_changes(changes)  # fmt: skip
        driver = Driver.prepare(
            experiment, Ingredients(self.dataset, self.split, self.model), Plan(engine="loop", chunk=1)
        )
        driver.run()
        return Outcome(driver)


@dataclass(frozen=True)
class Outcome:
    """What FedStrata has come to after the last round."""

    driver: Driver

    @property
    def server(self) -> Weights:
        """The model that the server holds."""
        return self.driver.engine.server.model

    @property
    def sent(self) -> Weights:
        """The model that the server sends in the next round."""
        engine = self.driver.engine
        message = engine.side.broadcast(engine.server, range(engine.setting.clients), self.driver.round + 1)
        return {name: tensor[0] for name, tensor in message.tensors.items() if name in engine.setting.initial}

    @property
    def tested(self) -> list[Weights]:
        """The model that each client uses and is tested with."""
        engine, last = self.driver.engine, self.driver.round
        messages = engine.central.messages(range(engine.setting.clients), last + 1, testing=True)
        models = [member.model(message, last) for member, message in zip(engine.members, messages, strict=True)]
        return [{name: tensor[0] for name, tensor in model.items()} for model in models]

    @property
    def test_losses(self) -> list[float]:
        """The loss of each client's model on its test samples, as it stands in the run's metrics."""
        rows = self.driver.metrics.to_tables()["clients"].to_pylist()
        last = [row for row in rows if row["metric"] == "client_after.loss" and row["round"] == self.driver.round]
        return [row["value"] for row in sorted(last, key=lambda row: row["client"])]

    def layers(self, metric: str) -> dict[str, float]:
        """A metric of the layers, as the first round noted it."""
        rows = self.driver.metrics.to_tables()["layers"].to_pylist()
        return {row["layer"]: row["value"] for row in rows if row["metric"] == metric and row["round"] == 1}

    def participants(self, round: int) -> tuple[int, ...]:
        """Who took part in a round."""
        return self.driver.engine.side.select(self.driver.experiment.participation, round)

    def batches(self, client: int, round: int) -> Iterator[np.ndarray]:
        """The samples of each local step of a client, as FedStrata drew them."""
        engine = self.driver.engine
        work: Work = engine.setting.work
        for batch in engine.members[client].side.data.batches([client], work, engine.setting.seed, round, "phase 0"):
            yield batch.positions[0].numpy()


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare two models tensor by tensor, to 1e-9; on how many batches a norm has counted nothing depends."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if "num_batches_tracked" not in name:
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda text, of=name: f"{of}: {text}"
            )


def assert_tested(federation: Federation, found: Outcome, expected: Sequence[Mapping[str, Tensor]]) -> None:
    """Compare the models that clients use, and the losses that are reported of them."""
    for client, (model, wanted) in enumerate(zip(found.tested, expected, strict=True)):
        assert_same(model, wanted)
        assert abs(found.test_losses[client] - federation.test_loss(client, wanted)) < 1e-9
