"""Methods that differ from FedAvg at the server, beside plain PyTorch."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federation import EPOCHS, RATE, ROUNDS, TWO_OF_THREE, Federation, assert_same, assert_tested
from torch import Tensor, nn

MOMENTUM = "sgd(learning_rate=0.2, momentum=0.9, weight_decay=0.01)"


def local_training(federation: Federation, client: int, server: Tensor) -> Tensor:
    """FedAvg's ClientUpdate: plain steps from the server's weights."""
    w = server
    for _ in range(EPOCHS):
        w = w - RATE * federation.gradient(client, w)
    return w


def test_fedavg() -> None:
    """McMahan et al., 2017, Algorithm 1, on minibatches; running statistics are averaged like weights."""
    federation = Federation(norm="batch")
    found = federation.run("fedavg", optimiser=MOMENTUM, batch_size=10, participation=TWO_OF_THREE)
    n = federation.sizes
    inputs, labels = federation.dataset.inputs, federation.dataset.labels

    server = federation.initial
    for round in range(1, ROUNDS + 1):
        trained = {}
        for k in found.participants(round):
            model = deepcopy(federation.model)
            model.load_state_dict(server)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
            for batch in found.batches(k, round):
                optimiser.zero_grad()
                F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimiser.step()
            trained[k] = model.state_dict()
        total = sum(n[k] for k in trained)
        server = {name: sum(n[k] / total * trained[k][name] for k in trained) for name in server}

    assert_same(found.server, server)
    assert_tested(federation, found, [server] * len(federation.clients))


def test_fedavg_shuffles_all_samples_of_a_client_once_in_every_epoch() -> None:
    """What is drawn need not be repeated in plain PyTorch, but it must be an epoch."""
    federation = Federation()
    found = federation.run("fedavg", batch_size=10, rounds=1, epochs=2)
    for k, positions in enumerate(federation.positions):
        drawn = np.concatenate(list(found.batches(k, 1)))
        first, second = np.split(drawn, 2)
        np.testing.assert_array_equal(np.sort(first), positions)
        np.testing.assert_array_equal(np.sort(second), positions)
        assert not np.array_equal(first, second)


def test_fedavgm() -> None:
    """Hsu et al., 2019, Section 3.3: v <- beta v + Delta, w <- w + rate * v (Delta points where clients went)."""
    federation = Federation()
    found = federation.run("fedavgm(beta=0.8, learning_rate=0.7)")
    p = federation.sizes / federation.sizes.sum()

    w = federation.initial_vector
    v = torch.zeros_like(w)
    for _ in range(ROUNDS):
        delta = sum(p[k] * (local_training(federation, k, w) - w) for k in federation.clients)
        v = 0.8 * v + delta
        w = w + 0.7 * v

    assert_same(found.server, federation.named(w))


@pytest.mark.parametrize("rule", ["fedadagrad", "fedyogi", "fedadam"])
def test_adaptive(rule: str) -> None:
    """Reddi et al., 2021, Algorithm 2, clients weighted by their samples."""
    eta, beta1, beta2, tau = 0.05, 0.6, 0.8, 0.01
    federation = Federation()
    second = "" if rule == "fedadagrad" else f", beta2={beta2}"
    found = federation.run(f"{rule}(learning_rate={eta}, beta1={beta1}, tau={tau}{second})")
    p = federation.sizes / federation.sizes.sum()

    x = federation.initial_vector
    m, v = torch.zeros_like(x), torch.full_like(x, tau**2)
    for _ in range(ROUNDS):
        delta = sum(p[k] * (local_training(federation, k, x) - x) for k in federation.clients)
        m = beta1 * m + (1 - beta1) * delta
        if rule == "fedadagrad":
            v = v + delta**2
        elif rule == "fedyogi":
            v = v - (1 - beta2) * delta**2 * torch.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        x = x + eta * m / (torch.sqrt(v) + tau)

    assert_same(found.server, federation.named(x))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova(momentum: float) -> None:
    """Wang et al., 2020, Eq. 4 and Section 4: clients that take 6, 12 and 16 steps, each divided by its ||a_i||_1."""
    federation = Federation()
    found = federation.run(
        "fednova", optimiser=f"sgd(learning_rate={RATE}, momentum={momentum})", batch_size=10, epochs=4, rounds=ROUNDS
    )
    p = federation.sizes / federation.sizes.sum()
    inputs, labels = federation.dataset.inputs, federation.dataset.labels

    x, model = federation.initial_vector, deepcopy(federation.model)
    for round in range(1, ROUNDS + 1):
        d, norm_of_a = [], []
        for i in federation.clients:
            nn.utils.vector_to_parameters(x.clone(), model.parameters())
            optimiser = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
            counter, sum_of_a = 0.0, 0.0
            for batch in found.batches(i, round):
                optimiser.zero_grad()
                F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimiser.step()
                counter = momentum * counter + 1
                sum_of_a = sum_of_a + counter
            y = nn.utils.parameters_to_vector(model.parameters()).detach()
            d.append((x - y) / sum_of_a)
            norm_of_a.append(sum_of_a)
        assert len(set(norm_of_a)) == len(norm_of_a)
        tau_eff = sum(p[i] * norm_of_a[i] for i in federation.clients)
        x = x - tau_eff * sum(p[i] * d[i] for i in federation.clients)

    assert_same(found.server, federation.named(x))


def test_fedlws() -> None:
    """Shi et al., 2025, Eq. 7 and 8 and Algorithm 1: a factor for each layer, of which its norm is a part."""
    beta = 5.0
    layers = (("conv1", "norm1"), ("conv2", "norm2"), ("hidden",), ("head",))
    federation = Federation()
    found = federation.run(f"fedavg+lws(beta={beta})")
    p = federation.sizes / federation.sizes.sum()

    w_g = federation.initial_vector
    for _ in range(ROUNDS):
        g = torch.stack([local_training(federation, k, w_g) - w_g for k in federation.clients])
        g_g = (p[:, None] * g).sum(0)
        w_new = w_g + g_g
        for layer in layers:
            in_l = federation.entries(*layer)
            tau = (g[:, in_l] - g[:, in_l].mean(0)).norm(dim=1).mean()
            gamma = w_g[in_l].norm() / (beta * tau * g_g[in_l].norm() + w_g[in_l].norm())
            w_new[in_l] = gamma * w_new[in_l]
        w_g = w_new

    assert_same(found.server, federation.named(w_g))
