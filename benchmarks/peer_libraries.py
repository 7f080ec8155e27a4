"""How each library of others does the work of ``peer_work.py``.

An adapter prepares the work in its library and calls ``serve`` with a function that runs a round and one that gives the
weights of the global model in the order and layout of the PyTorch model.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from peer_work import BATCH_SIZE, CLIENTS, EPOCHS, LEARNING_RATE, SAMPLES, SEED, LocalWork, Serve, weights_of


def fedjax(work: LocalWork, serve: Serve) -> None:
    """FedJAX: the local training of a client is one compiled function."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if not hasattr(jax, "tree_map"):  # FedJAX 0.0.17 calls it by a name that JAX has given up since
        jax.tree_map = jax.tree_util.tree_map
    import fedjax

    weights = weights_of(work.model())
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

    serve(one_round, lambda: weights_of(server.model))


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

    serve(one_round, lambda: weights_of(network))


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

    serve(one_round, lambda: weights_of(handler.model))


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

    serve(one_round, lambda: weights_of(handler.model))


def appfl(work: LocalWork, serve: Serve) -> None:
    """APPFL: a server agent and an agent for each client, run one after the other as in its serial simulation.

    Its logs go nowhere, and nothing is validated. ``optimize_memory`` is off, or a round spends nearly all of its time
    collecting garbage.
    """
    from appfl.agent import SimClientAgent, SimServerAgent
    from torch.utils.data import TensorDataset

    class Server(SimServerAgent):  # type: ignore[misc]
        def _load_model(self) -> None:
            self.model = work.model()

    class Client(SimClientAgent):  # type: ignore[misc]
        def _load_model(self) -> None:
            self.model = work.model()

        def _load_metric(self) -> None:
            self.metric = lambda labels, outputs: 100 * (outputs.argmax(1) == labels).mean()

    quick = {"optimize_memory": False}
    training = {
        "trainer": "VanillaTrainer",
        "mode": "epoch",
        "num_local_epochs": EPOCHS,
        "optim": "SGD",
        "optim_args": {"lr": LEARNING_RATE},
        "loss_fn": "CrossEntropyLoss",
        "train_batch_size": BATCH_SIZE,
        "train_data_shuffle": True,
        "do_validation": False,
        "do_pre_validation": False,
        "device": "cpu",
        "logging_output_filename": "",
        **quick,
    }
    serving = {
        "num_clients": CLIENTS,
        "num_global_epochs": 10**6,
        "scheduler": "SyncScheduler",
        "scheduler_kwargs": dict(quick),
        "aggregator": "FedAvgAggregator",
        "aggregator_kwargs": {"client_weights_mode": "sample_size", **quick},
        "device": "cpu",
        "logging_output_filename": "",
        **quick,
    }
    server = Server({"client_configs": {"train_configs": training}, "server_configs": serving})
    clients = [
        Client({"train_configs": training, **quick}, str(client), TensorDataset(inputs, labels))
        for client, (inputs, labels) in enumerate(zip(*work.tensors, strict=True))
    ]
    for client in clients:
        client.load_parameters(server.get_parameters(serial_run=True))
        server.set_sample_size(client.get_id(), client.get_sample_size())

    def one_round() -> None:
        answers = []
        for client in clients:
            client.train()
            trained, facts = client.get_parameters()
            answers.append(server.global_update(client.get_id(), trained, blocking=False, **facts))
        for client, answer in zip(clients, answers, strict=True):
            client.load_parameters(answer.result())

    serve(one_round, lambda: weights_of(server.model))


def pfllib(work: LocalWork, serve: Serve) -> None:
    """PFLlib, of a checkout: its server and clients for FedAvg, what its training does in a round without evaluations.

    Clients read their samples from files at the beginning of every round, as its data sets are laid out.
    """
    import numpy as np

    if "PFLLIB" not in os.environ:
        raise ImportError("PFLlib is in no package index: name a checkout of github.com/TsingZ0/PFLlib with --pfllib")
    sys.path.insert(0, str(Path(os.environ["PFLLIB"]) / "system"))
    from flcore.servers.serveravg import FedAvg

    off = ("random_join_ratio", "time_select", "auto_break", "learning_rate_decay", "dlg_eval")
    none = ("few_shot", "client_drop_rate", "train_slow_rate", "send_slow_rate", "num_new_clients")
    unused = ("goal", "save_folder_name", "top_cnt", "eval_gap", "dlg_gap", "batch_num_per_client")
    settings = argparse.Namespace(
        **dict.fromkeys(off, False),
        **dict.fromkeys(none, 0),
        **dict.fromkeys(unused),
        device="cpu",
        dataset="digits",
        num_classes=10,
        model=work.model(),
        algorithm="FedAvg",
        global_rounds=10**6,
        local_epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        local_learning_rate=LEARNING_RATE,
        learning_rate_decay_gamma=1.0,
        num_clients=CLIENTS,
        join_ratio=1.0,
        time_threthold=float("inf"),
        fine_tuning_epoch_new=0,
    )
    with tempfile.TemporaryDirectory() as name:
        for part in ("train", "test"):
            folder = Path(name, "dataset", settings.dataset, part)
            folder.mkdir(parents=True)
            for client, (inputs, labels) in enumerate(zip(*work.arrays, strict=True)):
                samples = np.array({"x": inputs, "y": labels}, dtype=object)
                np.savez_compressed(folder / f"{client}.npz", data=samples)
        here = Path(name, "system")  # it looks for data beside the folder that it runs in
        here.mkdir()
        os.chdir(here)
        server = FedAvg(settings, 0)

        def one_round() -> None:
            server.selected_clients = server.select_clients()
            server.send_models()
            for client in server.selected_clients:
                client.train()
            server.receive_models()
            server.aggregate_parameters()

        serve(one_round, lambda: weights_of(server.global_model))


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
        import peer_libraries  # by its name, so that a worker process keeps what it has once prepared
        import torch  # noqa: F401 - Flower turns records into tensors only where it is imported

        number = int(context.node_config["partition-id"])
        weights = peer_libraries.train_one(name, number, message.content["arrays"].to_torch_state_dict())
        content = RecordDict({"arrays": ArrayRecord(weights), "metrics": MetricRecord({"num-examples": SAMPLES})})
        return Message(content=content, reply_to=message)

    @server_app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        model = work.model()
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)

        def one_round() -> None:
            result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=1)
            model.load_state_dict(result.arrays.to_torch_state_dict())

        serve(one_round, lambda: weights_of(model))

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
