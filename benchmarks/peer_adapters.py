"""One piece of work, and how each library does it: run by ``peers.py``, one process for each.

An adapter prepares the work in its library and calls ``serve`` with a function that runs a round and one that gives the
weights of the global model in the order and layout of the PyTorch model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

CLIENTS, SAMPLES, BATCH_SIZE, EPOCHS, LEARNING_RATE, SEED = 100, 40, 10, 5, 0.1, 0
MODELS = {"mlp": "MLP 64-64-10", "cnn": "CNN of two convolutions"}

Serve = Callable[[Callable[[], Any], Callable[[], list[Any]]], None]


class LocalWork:
    """The digits of every client, and the model that all begin with."""

    def __init__(self, model: str) -> None:
        self.name = model

    @cached_property
    def arrays(self) -> tuple[Any, Any]:
        """Images ``[clients, samples, 1, 8, 8]`` in [0, 1] and labels; digits come more than once."""
        import numpy as np
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(SEED).permutation(np.arange(CLIENTS * SAMPLES) % len(labels))
        chosen = (images[order] / 16).astype(np.float32).reshape(CLIENTS, SAMPLES, 1, 8, 8)
        return chosen, labels[order].astype(np.int64).reshape(CLIENTS, SAMPLES)

    @cached_property
    def tensors(self) -> tuple[Any, Any]:
        """The same as tensors."""
        import torch

        inputs, labels = self.arrays
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def model(self) -> Any:
        """Build the model, with the same weights for everybody."""
        import torch
        from torch import nn

        torch.manual_seed(SEED)
        if self.name == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        head = nn.Linear(128, 10)
        return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), head)

    def loaders(self) -> list[Any]:
        """Give every client's samples in a loader of PyTorch that shuffles them."""
        from torch.utils.data import DataLoader, TensorDataset

        return [
            DataLoader(TensorDataset(inputs, labels), BATCH_SIZE, shuffle=True)
            for inputs, labels in zip(*self.tensors, strict=True)
        ]

    def loss_of(self, path: Path) -> float:
        """Compute the mean cross entropy of some weights on the samples of all clients."""
        import numpy as np
        import torch
        import torch.nn.functional as F

        model = self.model()
        with np.load(path) as stored, torch.no_grad():
            for parameter, name in zip(model.parameters(), stored.files, strict=True):
                parameter.copy_(torch.from_numpy(stored[name]))
            inputs, labels = (tensor.flatten(0, 1) for tensor in self.tensors)
            return float(F.cross_entropy(model(inputs), labels))


def _weights(model: Any) -> list[Any]:
    return [parameter.detach().numpy() for parameter in model.parameters()]


# FedStrata -----------------------------------------------------------------------------------------------------------


def _fedstrata(engine: str, work: LocalWork, serve: Serve) -> None:
    import fedstrata  # noqa: F401 - sets the environment before torch is imported

    import torch  # isort: skip
    import numpy as np

    from fedstrata.data import Split, from_arrays
    from fedstrata.engines.planning import Plan
    from fedstrata.experiment import Experiment
    from fedstrata.runs.driver import Driver
    from fedstrata.runs.preparing import Ingredients

    inputs, labels = (tensor.flatten(0, 1) for tensor in work.tensors)
    dataset = from_arrays(inputs, labels, class_names=tuple("0123456789"), test_fraction=0.0)
    positions = np.arange(CLIENTS * SAMPLES).reshape(CLIENTS, SAMPLES)
    experiment = Experiment(
        method="fedavg",
        optimiser=f"sgd(learning_rate={LEARNING_RATE})",
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        transforms="none",
        rounds=10**6,
        device="cpu",
        engine=engine,
    )
    ingredients = Ingredients(
        dataset=dataset, split=Split(tuple(positions), tuple(positions[:, :0])), model=work.model()
    )
    plan = Plan(engine, 1 if engine == "loop" else CLIENTS, torch.get_num_threads())
    run = Driver.prepare(experiment, ingredients, plan).engine
    numbers = iter(range(1, 10**6))
    names = [name for name, _ in work.model().named_parameters()]
    serve(
        lambda: run.round(next(numbers), range(CLIENTS), evaluate=False),
        lambda: [run.server.model[name].numpy() for name in names],
    )


def stacked(work: LocalWork, serve: Serve) -> None:
    """Train all clients as one batch of models."""
    _fedstrata("stacked", work, serve)


def loop(work: LocalWork, serve: Serve) -> None:
    """Train one client after the other, with every message encoded, checked and decoded."""
    _fedstrata("loop", work, serve)


# Plain PyTorch -------------------------------------------------------------------------------------------------------


def plain(work: LocalWork, serve: Serve) -> None:
    """Run the loop that most federated-learning code has: one module, one optimiser for each client, no messages."""
    import torch
    import torch.nn.functional as F

    inputs, labels = work.tensors
    model, server = work.model(), work.model().state_dict()

    def one_round() -> None:
        total = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
        for client in range(CLIENTS):
            model.load_state_dict(server)
            optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
            for _ in range(EPOCHS):
                order = torch.randperm(SAMPLES)
                for begin in range(0, SAMPLES, BATCH_SIZE):
                    chosen = order[begin : begin + BATCH_SIZE]
                    optimiser.zero_grad()
                    F.cross_entropy(model(inputs[client, chosen]), labels[client, chosen]).backward()
                    optimiser.step()
            for name, tensor in model.state_dict().items():
                total[name] += tensor / CLIENTS
        for name, tensor in server.items():
            tensor.copy_(total[name])

    serve(one_round, lambda: [tensor.numpy() for tensor in server.values()])


# Peers ---------------------------------------------------------------------------------------------------------------


def fedjax(work: LocalWork, serve: Serve) -> None:
    """FedJAX: the local training of a client is one compiled function."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if not hasattr(jax, "tree_map"):  # FedJAX 0.0.17 calls it by a name that JAX has given up since
        jax.tree_map = jax.tree_util.tree_map
    import fedjax

    weights = _weights(work.model())
    if work.name == "cnn":  # images, and windows, with the channel last
        weights = [weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight for weight in weights]

    def outputs(parameters: list[Any], images: Any) -> Any:
        *convolutions, head, bias = parameters if work.name == "cnn" else parameters[2:]
        features = images.transpose(0, 2, 3, 1)
        for kernel, shift in zip(convolutions[::2], convolutions[1::2], strict=True):
            axes = ("NHWC", "HWIO", "NHWC")
            features = jax.lax.conv_general_dilated(features, kernel, (1, 1), "SAME", dimension_numbers=axes)
            features = jax.nn.relu(features + shift)
            count, height, width, channels = features.shape
            features = features.reshape(count, height // 2, 2, width // 2, 2, channels).max((2, 4))
        features = features.transpose(0, 3, 1, 2).reshape(len(images), -1)
        if work.name == "mlp":
            features = jax.nn.relu(features @ parameters[0].T + parameters[1])
        return features @ head.T + bias

    def loss(parameters: list[Any], batch: Any, _: Any) -> Any:
        chances = jax.nn.log_softmax(outputs(parameters, batch["x"]))
        return -jnp.take_along_axis(chances, batch["y"][:, None], 1).mean()

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(LEARNING_RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH_SIZE, num_epochs=EPOCHS),
    )
    state = [algorithm.init([jnp.asarray(weight) for weight in weights])]
    datasets = [
        fedjax.ClientDataset({"x": inputs, "y": labels.astype(np.int32)})
        for inputs, labels in zip(*work.arrays, strict=True)
    ]
    keys = iter(range(10**6))

    def one_round() -> None:
        drawn = jax.random.split(jax.random.PRNGKey(next(keys)), CLIENTS)
        clients = [(str(client).encode(), datasets[client], drawn[client]) for client in range(CLIENTS)]
        state[0], _ = algorithm.apply(state[0], clients)
        jax.block_until_ready(state[0].params)

    def own_weights() -> list[Any]:
        arrays = map(np.asarray, state[0].params)
        return [array.transpose(3, 2, 0, 1) if array.ndim == 4 else array for array in arrays]

    serve(one_round, own_weights)


def fluke(work: LocalWork, serve: Serve) -> None:
    """Fluke: servers and clients that exchange models over a channel, without its displays and evaluations."""
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.server import Server
    from torch import nn

    clients = [
        Client(
            client,
            FastDataLoader(inputs, labels, num_labels=10, batch_size=BATCH_SIZE, shuffle=True),
            None,
            OptimizerConfigurator({"name": "SGD", "lr": LEARNING_RATE}),
            nn.CrossEntropyLoss(),
            local_epochs=EPOCHS,
        )
        for client, (inputs, labels) in enumerate(zip(*work.tensors, strict=True))
    ]
    server = Server(work.model(), None, clients, weighted=True)
    for client in clients:
        client.set_channel(server.channel)
    numbers = iter(range(1, 10**6))

    def one_round() -> None:
        number = next(numbers)
        server.broadcast_model(clients)
        for client in clients:
            client.local_update(number)
        server.aggregate(clients, server.receive_client_models(clients, state_dict=False))

    serve(one_round, lambda: _weights(server.model))


def pfl_research(work: LocalWork, serve: Serve) -> None:
    """pfl-research: its simulated backend in one process."""
    import torch
    import torch.nn.functional as F
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    network = work.model()
    network.loss = lambda inputs, labels, **_: F.cross_entropy(network(inputs), labels)
    network.metrics = lambda inputs, labels, **_: {}
    inputs, labels = work.tensors
    order = iter(range(10**9))
    data = FederatedDataset(
        lambda client: PyTorchTensorDataset((inputs[client], labels[client])), lambda: next(order) % CLIENTS
    )
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    backend, algorithm = SimulatedBackend(data, data), FederatedAveraging()
    training = NNTrainHyperParams(
        local_batch_size=BATCH_SIZE, local_num_epochs=EPOCHS, local_learning_rate=LEARNING_RATE
    )
    numbers = iter(range(1, 10**6))

    def one_round() -> None:
        until = NNAlgorithmParams(
            central_num_iterations=next(numbers),
            evaluation_frequency=10**9,
            train_cohort_size=CLIENTS,
            val_cohort_size=0,
        )
        algorithm.run(until, backend, model, training, send_metrics_to_platform=False)

    serve(one_round, lambda: _weights(network))


def fedlab(work: LocalWork, serve: Serve) -> None:
    """FedLab: its serial trainer, what its standalone pipeline does in a round."""
    from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler

    loaders = work.loaders()

    class Digits:
        def get_dataloader(self, client: int, batch_size: int) -> Any:
            return loaders[client]

    handler = FedAvgServerHandler(work.model(), global_round=10**6, sample_ratio=1.0)
    trainer = FedAvgSerialClientTrainer(work.model(), CLIENTS)
    trainer.setup_dataset(Digits())
    trainer.setup_optim(EPOCHS, BATCH_SIZE, LEARNING_RATE)
    handler.num_clients = CLIENTS

    def one_round() -> None:
        trainer.local_process(handler.downlink_package, handler.sample_clients())
        for package in trainer.uplink_package:
            handler.load(package)

    serve(one_round, lambda: _weights(handler.model))


def blazefl(work: LocalWork, serve: Serve) -> None:
    """BlazeFL: its trainer of one client after the other."""
    import torch
    from blazefl.contrib.fedavg import FedAvgBaseClientTrainer, FedAvgBaseServerHandler
    from blazefl.core import ModelSelector, PartitionedDataset
    from torch.utils.data import DataLoader, Dataset, TensorDataset

    datasets = [TensorDataset(inputs, labels) for inputs, labels in zip(*work.tensors, strict=True)]

    class Digits(PartitionedDataset):  # type: ignore[type-arg]
        def get_dataset(self, type_: Any, cid: int | None) -> Dataset[Any]:
            return datasets[cid or 0]

        def get_dataloader(
            self, type_: Any, cid: int | None, batch_size: int | None, generator: torch.Generator | None = None
        ) -> DataLoader[Any]:
            return DataLoader(datasets[cid or 0], batch_size, shuffle=True, generator=generator)

    class Selector(ModelSelector):
        def select_model(self, model_name: str) -> Any:
            return work.model()

    handler = FedAvgBaseServerHandler(
        Selector(), work.name, Digits(), 10**6, CLIENTS, 1.0, "cpu", batch_size=BATCH_SIZE, seed=SEED
    )
    trainer = FedAvgBaseClientTrainer(
        Selector(), work.name, Digits(), "cpu", CLIENTS, EPOCHS, BATCH_SIZE, LEARNING_RATE, SEED
    )

    def one_round() -> None:
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            handler.load(package)

    serve(one_round, lambda: _weights(handler.model))


def flower(work: LocalWork, serve: Serve) -> None:
    """Flower's simulation: clients in worker processes of Ray, one for each core."""
    import ray  # noqa: F401 - without it there is no simulation
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    name, cores = work.name, len(os.sched_getaffinity(0))
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        import peer_adapters  # by its name, so that a worker process keeps what it has once prepared
        import torch  # noqa: F401 - Flower turns records into tensors only where it is imported

        number = int(context.node_config["partition-id"])
        weights = peer_adapters.train_one(name, number, message.content["arrays"].to_torch_state_dict())
        content = RecordDict({"arrays": ArrayRecord(weights), "metrics": MetricRecord({"num-examples": SAMPLES})})
        return Message(content=content, reply_to=message)

    @server_app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        model = work.model()
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)

        def one_round() -> None:
            result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=1)
            model.load_state_dict(result.arrays.to_torch_state_dict())

        serve(one_round, lambda: _weights(model))

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    backend = {"client_resources": resources, "init_args": {"num_cpus": cores}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=backend)


_PREPARED: dict[str, tuple[LocalWork, Any]] = {}


def train_one(name: str, client: int, state: dict[str, Any]) -> dict[str, Any]:
    """Train one client in a worker process: the samples and the model are prepared there once."""
    import torch
    import torch.nn.functional as F

    if name not in _PREPARED:
        torch.set_num_threads(1)
        _PREPARED[name] = LocalWork(name), LocalWork(name).model()
    work, model = _PREPARED[name]
    inputs, labels = (tensor[client] for tensor in work.tensors)
    model.load_state_dict(state)
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(SAMPLES).split(BATCH_SIZE):
            optimiser.zero_grad()
            F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimiser.step()
    trained: dict[str, Any] = model.state_dict()
    return trained


ADAPTERS: dict[str, Callable[[LocalWork, Serve], None]] = {
    "plain loop": plain,
    "FedStrata, stacked": stacked,
    "FedStrata, loop": loop,
    "FedJAX": fedjax,
    "fluke": fluke,
    "pfl-research": pfl_research,
    "FedLab": fedlab,
    "BlazeFL": blazefl,
    "Flower, simulation": flower,
}


# The process of one system -------------------------------------------------------------------------------------------


def _serve_on(channel: TextIO) -> Serve:
    def say(**answer: object) -> None:
        print(json.dumps(answer), file=channel, flush=True)

    def serve(one_round: Callable[[], Any], weights: Callable[[], list[Any]]) -> None:
        import numpy as np

        say(ready=True)
        for line in sys.stdin:
            order, _, rest = line.strip().partition(" ")
            if order == "round":
                began = time.perf_counter()
                one_round()
                say(seconds=time.perf_counter() - began)
            else:
                np.savez(rest, *weights())
                say(saved=rest)

    return serve


def main() -> None:
    """Run one system on some cores: answer on what was the standard output, which the peers now cannot disturb."""
    system, model, cores = sys.argv[1:]
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        ADAPTERS[system](LocalWork(model), _serve_on(channel))
    except ImportError as error:
        print(json.dumps({"missing": f"{error}"}), file=channel, flush=True)


if __name__ == "__main__":
    main()
