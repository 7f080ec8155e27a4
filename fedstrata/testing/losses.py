"""What engines rely on in a loss."""

from __future__ import annotations

import torch

from fedstrata.errors import FedStrataError
from fedstrata.losses import Loss, losses
from fedstrata.testing.requiring import require

_CLIENTS, _SAMPLES = 3, 4


def check_loss(loss: str | Loss, classes: int = 5) -> None:
    """Check that a loss can be federated: a number for every sample, each client by itself, with gradients to follow.

    >>> check_loss("focal(gamma=1, weights=balanced)")
    """
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(_CLIENTS, _SAMPLES, classes, generator=generator, dtype=torch.float64).requires_grad_()
    counts = torch.arange(_CLIENTS * classes).view(_CLIENTS, classes) * 7 % 11  # the first client lacks class 0
    labels = counts.argsort(dim=1, descending=True)[:, torch.arange(_SAMPLES) % (classes - 1)]
    try:
        chosen = losses.make(loss)
        chosen.check(classes)
        together = chosen(outputs, labels, counts)
        alone = [chosen(*(part[k : k + 1] for part in (outputs, labels, counts))) for k in range(_CLIENTS)]
    except FedStrataError as error:
        raise AssertionError(f"the loss cannot be used: {error}") from error
    require(bool(torch.isfinite(together).all()), "the loss is not finite")
    require(
        torch.allclose(together, torch.cat(alone), rtol=1e-9, atol=1e-12),
        "the loss of a client depends on the other clients that are trained with it",
    )
    if chosen.judges:
        said = [chosen.samples(outputs, labels, some) for some in (counts, torch.ones_like(counts))]
        require(torch.equal(*said), "the loss says that it judges, but depends on the classes of the client")
        require(chosen.weights_of(labels, counts) is None, "the loss says that it judges, but weighs samples")
    require(together.requires_grad, "the loss has no gradient")
    [slopes] = torch.autograd.grad(together.sum(), outputs)
    require(bool(torch.isfinite(slopes).all()), "the gradient of the loss is not finite")
    require(bool((slopes != 0).flatten(1).any(1).all()), "the loss of some client has no gradient")
