"""Methods with a model, or a part of one, for each client, beside plain PyTorch."""

from __future__ import annotations

import torch
from federation import EPOCHS, RATE, ROUNDS, TWO_OF_THREE, Federation, assert_same, assert_tested


def test_ditto() -> None:
    """Li et al., 2021, Algorithm 1: FedAvg beside personal models that are held near the model as it was sent.

    Who sits out keeps its personal model; clients count by their samples.
    """
    lam = 0.7
    federation = Federation()
    found = federation.run(
        f"ditto(strength={lam})",
        optimiser=f"sgd(learning_rate={RATE}, momentum=0.9)",
        participation=TWO_OF_THREE,
    )
    n = federation.sizes

    w = federation.initial_vector
    v = [w.clone() for _ in federation.clients]
    for round in range(1, ROUNDS + 1):
        trained = {}
        for k in found.participants(round):
            w_k, v_k = w.clone().requires_grad_(), v[k].clone().requires_grad_()
            for_global = torch.optim.SGD([w_k], lr=RATE, momentum=0.9)
            for_personal = torch.optim.SGD([v_k], lr=RATE, momentum=0.9)
            for _ in range(EPOCHS):
                for_global.zero_grad()
                federation.loss(k, w_k).backward()
                for_global.step()
            for _ in range(EPOCHS):
                for_personal.zero_grad()
                (federation.loss(k, v_k) + lam / 2 * (v_k - w).square().sum()).backward()
                for_personal.step()
            trained[k] = w_k.detach()
            v[k] = v_k.detach()
        w = sum(n[k] * trained[k] for k in trained) / sum(n[k] for k in trained)

    assert_same(found.server, federation.named(w))
    assert_tested(federation, found, [federation.named(v_k) for v_k in v])


def test_pfedme() -> None:
    """Dinh et al., 2020, Algorithm 1; theta_i goes on from batch to batch, as in the authors' code."""
    eta, lam, big_k, inner_rate, mu, beta = 0.02, 4.0, 3, 0.09, 0.01, 0.8
    federation = Federation()
    found = federation.run(
        f"pfedme(strength={lam}, inner_steps={big_k}, personal_rate={inner_rate}, decay={mu}, beta={beta})",
        optimiser=f"sgd(learning_rate={eta})",
        schedule="exponential(decay=0.5)",
    )
    p = federation.sizes / federation.sizes.sum()

    w = federation.initial_vector
    theta = [w for _ in federation.clients]
    for t in range(ROUNDS):
        local = []
        for i in federation.clients:
            w_i = theta[i] = w
            for _ in range(EPOCHS):
                for _ in range(big_k):
                    slope = federation.gradient(i, theta[i]) + lam * (theta[i] - w_i) + mu * theta[i]
                    theta[i] = theta[i] - inner_rate * 0.5**t * slope
                w_i = w_i - eta * 0.5**t * lam * (w_i - theta[i])
            local.append(w_i)
        w = (1 - beta) * w + beta * sum(p[i] * local[i] for i in federation.clients)

    assert_same(found.server, federation.named(w))
    assert_tested(federation, found, [federation.named(theta_i) for theta_i in theta])


def test_fedrep() -> None:
    """Collins et al., 2021, Algorithm 1: some epochs for the head, then some for the representation, which is sent.

    What is not trained does not decay either.
    """
    head_epochs, body_epochs = 3, 2
    federation = Federation()
    found = federation.run(
        f"fedrep(head_epochs={head_epochs}, body_epochs={body_epochs})",
        optimiser=f"sgd(learning_rate={RATE}, momentum=0.9, weight_decay=0.01)",
    )
    p = federation.sizes / federation.sizes.sum()
    in_head = federation.entries("head")

    phi = federation.initial_vector[~in_head]
    h = [federation.initial_vector[in_head] for _ in federation.clients]

    def together(body: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(in_head)).double().masked_scatter(~in_head, body).masked_scatter(in_head, head)

    for _ in range(ROUNDS):
        bodies = []
        for i in federation.clients:
            phi_i, h_i = phi.clone().requires_grad_(), h[i].clone().requires_grad_()
            for moving, epochs in ((h_i, head_epochs), (phi_i, body_epochs)):
                optimiser = torch.optim.SGD([moving], lr=RATE, momentum=0.9, weight_decay=0.01)
                for _ in range(epochs):
                    optimiser.zero_grad()
                    federation.loss(i, together(phi_i, h_i)).backward()
                    optimiser.step()
            bodies.append(phi_i.detach())
            h[i] = h_i.detach()
        phi = sum(p[i] * bodies[i] for i in federation.clients)

    shared = {name: tensor for name, tensor in federation.named(together(phi, h[0])).items() if "head" not in name}
    assert_same(found.server, shared)
    assert_tested(federation, found, [federation.named(together(phi, h_i)) for h_i in h])


def test_player_fl() -> None:
    """PLayer-FL, Eq. 2 and 3 and Algorithm 1: the sensitivity after an epoch, the split, and three rounds under it."""
    federation = Federation()
    layers = {"conv1": ("conv1", "norm1"), "conv2": ("conv2", "norm2"), "hidden": ("hidden",), "head": ("head",)}
    p = federation.sizes / federation.sizes.sum()

    curve = torch.zeros(len(layers), dtype=torch.float64)
    for k in federation.clients:
        theta = federation.initial_vector
        theta = theta - RATE * federation.gradient(k, theta)
        product = federation.named(theta * federation.gradient(k, theta))
        curve += torch.stack([product[f"{layer}.weight"].square().mean() for layer in layers]).cumsum(0)
    ratios = curve[1:] / curve[:-1]
    threshold = float(ratios[0] + 0.9 * (ratios[1] - ratios[0]))
    first = next(place for place in range(len(ratios)) if ratios[place] > threshold)
    assert first == 1
    federated = federation.entries(*sum(list(layers.values())[: first + 1], ()))

    found = federation.run(f"player(threshold={threshold})")
    w = [federation.initial_vector for _ in federation.clients]
    for _ in range(ROUNDS):
        for k in federation.clients:
            for _ in range(EPOCHS):
                w[k] = w[k] - RATE * federation.gradient(k, w[k])
        mean = sum(p[k] * w[k] for k in federation.clients)
        w = [torch.where(federated, mean, w[k]) for k in federation.clients]

    measured = found.layers("federation_sensitivity")
    assert list(measured) == list(layers)
    torch.testing.assert_close(torch.tensor(list(measured.values()), dtype=torch.float64), curve, rtol=1e-9, atol=0)
    assert_tested(federation, found, [federation.named(w_k) for w_k in w])
