"""Methods that mask weights, beside plain PyTorch."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from federation import EPOCHS, RATE, ROUNDS, Federation, assert_same, assert_tested


def test_ssfl() -> None:
    """Ohib et al., Eq. 2 and 3 and Algorithm 1: the mask of the weights, and three rounds under it."""
    sigma = 0.6
    federation = Federation()
    found = federation.run(
        f"ssfl(sparsity={sigma}, batch_size=1000)",
        optimiser=f"sgd(learning_rate={RATE}, momentum=0.9, weight_decay=0.01)",
    )
    p = federation.sizes / federation.sizes.sum()
    named = federation.named(federation.initial_vector)
    maskable = torch.cat([torch.full((w.numel(),), w.dim() > 1) for w in named.values()])

    w_0 = federation.initial_vector
    s = sum(p[k] * (federation.gradient(k, w_0) * w_0).abs() for k in federation.clients)[maskable]
    kept = math.floor((1 - sigma) * len(s))
    m = torch.ones_like(w_0)
    m[maskable] = torch.zeros_like(s).scatter(0, s.topk(kept).indices, 1.0)

    w_g = w_0 * m
    for _ in range(ROUNDS):
        trained = []
        for k in federation.clients:
            w = w_g.clone().requires_grad_()
            optimiser = torch.optim.SGD([w], lr=RATE, momentum=0.9, weight_decay=0.01)
            for _ in range(EPOCHS):
                w.grad = federation.gradient(k, w) * m
                optimiser.step()
            trained.append(w.detach())
        w_g = sum(p[k] * trained[k] for k in federation.clients)

    assert_same(found.server, federation.named(w_g))
    assert_tested(federation, found, [federation.named(w_g)] * len(federation.clients))
    for tested in found.tested:
        masked = sum(int((tensor == 0).sum()) for name, tensor in tested.items() if tensor.dim() > 1)
        assert masked == int(maskable.sum()) - kept


@pytest.mark.parametrize("every", [1, 2])
def test_lips(every: int) -> None:
    """LIPS, Eq. 3 to 6: transient sparsity of the middle layers after rounds 1 and 2, or only 2; norms stay local."""
    tau_0, middle = 0.7, ("conv2.weight", "hidden.weight")
    federation = Federation(norm="batch")
    found = federation.run(f"lips(tau0={tau_0}, every={every})", optimiser=f"sgd(learning_rate={RATE}, momentum=0.9)")
    p = federation.sizes / federation.sizes.sum()

    clients = [deepcopy(federation.model) for _ in federation.clients]
    for t in range(1, ROUNDS + 1):
        sensitivity = []
        for model, (x, y) in zip(clients, federation.data, strict=True):
            before = deepcopy(model.state_dict())
            optimiser = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
            for _ in range(EPOCHS):
                optimiser.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimiser.step()
            after = model.state_dict()
            sensitivity.append({name: ((after[name] - before[name]) * after[name]).abs() for name in middle})

        states = [deepcopy(model.state_dict()) for model in clients]
        shared = {
            name: sum(p[k] * states[k][name] for k in federation.clients) for name in states[0] if "norm" not in name
        }
        for model, s in zip(clients, sensitivity, strict=True):
            model.load_state_dict(shared, strict=False)
            tau = tau_0 * (1 - t / ROUNDS)
            if t % every == 0:
                for name in middle:
                    lowest = s[name].flatten().argsort()[: math.floor(tau * s[name].numel())]
                    model.state_dict()[name].view(-1)[lowest] = 0

    assert_same(found.server, shared)
    assert_tested(federation, found, [model.state_dict() for model in clients])
