"""Measurements from the papers' studies that are no runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedstrata.engines.client import ClientSide
from fedstrata.engines.forward import LoopForward
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.functional import mask_error, mean_saliency, top_mask
from fedstrata.methods.mechanisms.masking import maskable
from fedstrata.runs.preparing import Ingredients, prepare
from fedstrata.stack import repeat


def mask_errors(
    minibatches: Sequence[int],
    experiment: Experiment | None = None,
    ingredients: Ingredients | None = None,
    *,
    sparsity: float = 0.5,
    batch_size: int = 16,
    scope: str = "weights",
) -> dict[int, float]:
    r"""Measure how far SSFL's mask from some minibatches is from the oracle's (SSFL, Section 4.2.3 and Fig. 4).

    The data, its division over clients and the initial model are those of the experiment. The oracle scores each weight
    by :math:`|\partial L / \partial w \cdot w_0|` on the whole training set. A mask from some minibatches takes the
    mean of :math:`|\partial L_b / \partial w \cdot w_0|` over them, by their clients' data; minibatches come from the
    clients in turn, so that with as many of them as clients it is the mask of ``ssfl``, and with twice as many that of
    ``ssfl(batches=2)``. Returned is the :func:`~fedstrata.functional.mask_error` for each number of minibatches.

    >>> errors = mask_errors([1, 30], Experiment(data="digits", clients=10, model="mlp"))
    >>> 0 < errors[30] < errors[1] < 0.5
    True
    """
    if not minibatches or min(minibatches) < 1:
        raise FedStrataError(f"The numbers of minibatches are {list(minibatches)}; give some, each at least 1.")
    ready = prepare(experiment or Experiment(), ingredients)
    setting, clients = ready.setting, ready.setting.clients
    side = ClientSide(setting, LoopForward(ready.model, setting.head), ready.data)
    model = repeat(setting.initial, 1)
    weights = {name: model[name] for name in maskable(setting.layers, scope)}
    sizes = ready.declared.sizes.tolist()

    products = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for client in range(clients):
        gradients = side.probe([client], 1).gradients(model, batch_size, all_samples=True)
        for name, weight in weights.items():
            products[name] += sizes[client] * gradients[name] * weight
    oracle = top_mask({name: product.abs() for name, product in products.items()}, sparsity)

    errors, scores = {}, {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for number in range(max(minibatches)):
        turn, client = divmod(number, clients)
        gradients = side.probe([client], 1).gradients(model, batch_size, draw=turn)
        for name, score in mean_saliency([gradients], weights).items():
            scores[name] += sizes[client] * score
        if number + 1 in minibatches:
            errors[number + 1] = mask_error(top_mask(scores, sparsity), oracle)
    return errors
