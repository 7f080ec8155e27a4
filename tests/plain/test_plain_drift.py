"""Methods that change what clients minimise or how they step, beside plain PyTorch."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from federation import EPOCHS, RATE, ROUNDS, TWO_OF_THREE, Federation, Outcome, assert_same, assert_tested
from torch import Tensor


def test_fedprox() -> None:
    """Li et al., 2020, Eq. 2, with a local solver that has momentum and weight decay."""
    mu = 0.3
    federation = Federation()
    found = federation.run(f"fedprox(mu={mu})", optimiser=f"sgd(learning_rate={RATE}, momentum=0.9, weight_decay=0.01)")
    p = federation.sizes / federation.sizes.sum()

    server = federation.initial_vector
    for _ in range(ROUNDS):
        trained = []
        for k in federation.clients:
            w = server.clone().requires_grad_()
            solver = torch.optim.SGD([w], lr=RATE, momentum=0.9, weight_decay=0.01)
            for _ in range(EPOCHS):
                solver.zero_grad()
                (federation.loss(k, w) + mu / 2 * (w - server).square().sum()).backward()
                solver.step()
            trained.append(w.detach())
        server = sum(p[k] * trained[k] for k in federation.clients)

    assert_same(found.server, federation.named(server))


def test_scaffold() -> None:
    """Karimireddy et al., 2020, Algorithm 1, Option II; two of three clients take part in a round."""
    eta_g, eta_l, big_k = 0.7, RATE, EPOCHS
    federation = Federation()
    found = federation.run(f"scaffold(learning_rate={eta_g})", participation=TWO_OF_THREE)
    big_n = len(federation.clients)

    x = federation.initial_vector
    c = torch.zeros_like(x)
    c_of = [torch.zeros_like(x) for _ in federation.clients]
    for round in range(1, ROUNDS + 1):
        sampled = found.participants(round)
        delta_y, delta_c = [], []
        for i in sampled:
            y = x
            for _ in range(big_k):
                y = y - eta_l * (federation.gradient(i, y) - c_of[i] + c)
            c_plus = c_of[i] - c + (x - y) / (big_k * eta_l)
            delta_y.append(y - x)
            delta_c.append(c_plus - c_of[i])
            c_of[i] = c_plus
        x = x + eta_g / len(sampled) * sum(delta_y)
        c = c + 1 / big_n * sum(delta_c)

    assert len({found.participants(round) for round in range(1, ROUNDS + 1)}) > 1
    assert_same(found.server, federation.named(x))


def feddyn(federation: Federation, found: Outcome, alpha: float, scaled: bool) -> tuple[Tensor, Tensor]:
    """Acar et al., 2021, Algorithm 1: the model that is sent after the last round, and the mean of the devices'.

    The authors' code divides a device's regulariser by its size, relative to the mean size.
    """
    m = len(federation.clients)
    weight = federation.sizes / federation.sizes.mean() if scaled else torch.ones(m)
    theta = federation.initial_vector
    h = torch.zeros_like(theta)
    gradient = [torch.zeros_like(theta) for _ in federation.clients]
    for round in range(1, ROUNDS + 1):
        active = found.participants(round)
        trained = {}
        for k in active:
            w = theta
            for _ in range(EPOCHS):
                w = w - RATE * (federation.gradient(k, w) + (alpha * (w - theta) - gradient[k]) / weight[k])
            trained[k] = w
            gradient[k] = gradient[k] - alpha * (trained[k] - theta)
        h = h - alpha / m * sum(trained[k] - theta for k in active)
        mean = sum(trained.values()) / len(active)
        theta = mean - h / alpha
    return theta, mean


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("participation", [1.0, TWO_OF_THREE])
def test_feddyn(participation: float, scaled: bool) -> None:
    federation = Federation()
    found = federation.run(f"feddyn(alpha=0.1, scaled={str(scaled).lower()})", participation=participation)
    assert_same(found.sent, federation.named(feddyn(federation, found, 0.1, scaled)[0]))


def test_feddyn_is_tested_with_the_mean_of_the_devices() -> None:
    """As the authors score it: the corrected model is only where the next round begins."""
    federation = Federation()
    found = federation.run("feddyn(alpha=0.1)")
    mean = feddyn(federation, found, 0.1, scaled=True)[1]
    assert_tested(federation, found, [federation.named(mean)] * len(federation.clients))


def test_moon() -> None:
    """Li et al., 2021, Algorithm 1: in evaluation mode the received and the client's last model see the same batch."""
    mu, temperature = 2.0, 0.5
    federation = Federation(norm="batch")
    found = federation.run(f"moon(mu={mu}, temperature={temperature})")
    p = federation.sizes / federation.sizes.sum()

    server = deepcopy(federation.model)
    previous = [deepcopy(federation.model) for _ in federation.clients]
    for _ in range(ROUNDS):
        trained = [deepcopy(server) for _ in federation.clients]
        for k, (x, y) in enumerate(federation.data):
            model, received, before = trained[k].train(), server.eval(), previous[k].eval()
            optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
            for _ in range(EPOCHS):
                z = model.features(x)
                with torch.no_grad():
                    z_global, z_previous = received.features(x), before.features(x)
                near = torch.exp(F.cosine_similarity(z, z_global) / temperature)
                far = torch.exp(F.cosine_similarity(z, z_previous) / temperature)
                supervised = F.cross_entropy(model.head(z), y)
                contrastive = -torch.log(near / (near + far)).mean()
                optimiser.zero_grad()
                (supervised + mu * contrastive).backward()
                optimiser.step()
        previous = trained
        states = [model.state_dict() for model in trained]
        server.load_state_dict({name: sum(p[k] * states[k][name] for k in federation.clients) for name in states[0]})

    assert_same(found.server, server.state_dict())
