"""What engines rely on in a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fedstrata.data import from_arrays
from fedstrata.engines.planning import stacking_obstacle
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.layers import LayerMap
from fedstrata.models import ModelSpec, build_model, refuse_frozen
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients, prepare
from fedstrata.testing.requiring import require

_SAMPLES = 24


def check_model(
    model: str | nn.Module | ModelSpec | Callable[..., nn.Module],
    input_shape: tuple[int, ...] = (1, 8, 8),
    classes: int = 10,
    tokens: int | None = None,
) -> None:
    """Check that a model can be federated: built for the shape, its layers found, trained by either engine alike.

    Give a model, a function that builds one from ``(input_shape, classes)``, or a registered name. A model that can
    only be trained one client after another passes, too; engines say so when they run it. With ``tokens``, inputs are
    whole numbers below it, as for a model of texts.

    >>> check_model("mlp")
    """
    generator = torch.Generator().manual_seed(0)
    if tokens is None:
        inputs, trial = torch.randn(_SAMPLES, *input_shape, generator=generator), None
    else:
        inputs = torch.randint(0, tokens, (_SAMPLES, *input_shape), generator=generator)
        trial = inputs[:2]
    try:
        built = build_model(model, input_shape, classes, 0, trial)
        refuse_frozen(built)
        layers = LayerMap.read(built, input_shape, trial)
    except FedStrataError as error:
        raise AssertionError(f"the model cannot be built: {error}") from error
    require(layers.weighted, "the model has no layers with weights")
    unused = [layer.name for layer in layers.unused]
    require(not unused, f"the forward pass never meets {unused[:3]}, so that nothing would train them")
    data = from_arrays(inputs, torch.arange(_SAMPLES) % classes, class_names=tuple(map(str, range(classes))))
    experiment = Experiment(
        rounds=1,
        epochs=1,
        clients=2,
        partition="iid",
        batch_size=4,
        last_batch="drop",  # a single sample has no variance to be normalised by
        precision="fp64",
        transforms="none",
    )
    ingredients = Ingredients(dataset=data, model=built)
    ready = prepare(experiment, ingredients)
    engines = ["loop"] if stacking_obstacle(ready.setting, ready.model, ready.data) else ["loop", "stacked"]
    trained = []
    for engine in engines:
        driver = Driver.prepare(experiment.with_changes({"engine": engine}), ingredients)
        driver.step()
        trained.append(driver.engine.server.model)
        for name, tensor in driver.engine.server.model.items():
            require(bool(torch.isfinite(tensor.double()).all()), f"'{name}' is not finite after a round")
    for name, tensor in trained[0].items():
        other = trained[-1][name]
        require(
            torch.allclose(tensor.double(), other.double(), rtol=1e-8, atol=1e-8),
            f"one by one and stacked, '{name}' is trained differently",
        )
