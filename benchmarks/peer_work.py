"""The work that every library is given, the plain loop that does it, and how a process is asked for rounds of it."""

from __future__ import annotations

import json
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


def weights_of(model: Any) -> list[Any]:
    """Give the weights of a PyTorch model."""
    return [parameter.detach().numpy() for parameter in model.parameters()]


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


def serve_on(channel: TextIO) -> Serve:
    """Answer the orders on the standard input: run a round and tell its seconds, or save the weights."""

    def say(**answer: object) -> None:
        print(json.dumps(answer), file=channel, flush=True)

    def serve(one_round: Callable[[], Any], weights: Callable[[], list[Any]]) -> None:
        import numpy as np

        say(ready=True)
        for line in sys.stdin:
            order, _, rest = line.strip().partition(" ")
            if order == "round":
                began, computed = time.perf_counter(), time.process_time()
                one_round()
                say(seconds=time.perf_counter() - began, processor=time.process_time() - computed)
            else:
                np.savez(rest, *weights())
                say(saved=rest)

    return serve
