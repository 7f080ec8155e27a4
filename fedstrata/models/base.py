"""How models are named, built and checked."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.models.trial import copied, forward, undisturbed, zero_samples
from fedstrata.private_torch import uncompiled
from fedstrata.rng import torch_seed
from fedstrata.spec import Registry, Spec

models = Registry["ModelSpec"]("model")
_NAMED = 3
"""How many parameters a sentence names before it counts the rest."""


@dataclass(frozen=True)
class ModelSpec(Spec, ABC):
    """A model with its parameters, which builds an ordinary ``nn.Module`` for given data."""

    def find(self) -> object:
        """Find what :meth:`build` reads or imports besides, such as pretrained weights; what is missing is told.

        It needs no data, and reads nothing. A model of somebody's own may leave it out.
        """
        return None

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the module, drawing initial weights from PyTorch's global generator, which the caller has seeded.

        Raises a :class:`FedStrataError` where the network cannot take inputs of this shape.
        """


def build_model(
    given: str | ModelSpec | nn.Module | Callable[..., nn.Module],
    input_shape: tuple[int, ...],
    classes: int,
    seed: int,
    sample: Tensor | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """Build a model and check that it turns inputs of this shape into one score per class.

    ``given`` is a name such as ``cnn(norm=group)``, a spec, a module (copied with its weights, so that the given one
    never changes) or a function that returns a module and takes either nothing or ``(input_shape, classes)``. Weights
    are drawn on the CPU, from ``seed`` alone; the random numbers of the rest of the program are not touched. The check
    uses two samples of zeros, or ``sample``, a batch of inputs, where zeros are no valid input (token numbers). A model
    that went through ``torch.compile`` is taken as it was before: engines run it in a way of their own. The model is
    put on the ``device``, if one is given, and checked there: on a machine with a GPU the cores may be few and slow.

    >>> model = build_model("mlp(hidden=16)", (1, 8, 8), classes=10, seed=0)
    >>> sum(parameter.numel() for parameter in model.parameters())
    1210
    """
    source = models.make(given) if isinstance(given, str) else given
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(torch_seed(seed, "model"))
        model = _construct(source, input_shape, classes)
    model = uncompiled(model)
    name = source.name if isinstance(source, ModelSpec) else type(model).__name__
    if sample is not None:  # on the CPU: on a GPU, a number that an embedding does not have ends the process
        _check(model, name, sample, classes)
    model = model if device is None else model.to(device)
    if sample is None:
        _check(model, name, zero_samples(model, input_shape), classes)
    return model


def refuse_frozen(model: nn.Module) -> None:
    """Refuse a model with parameters that are not to be trained: all are, and whoever froze some would not be told.

    Only what could be trained counts: whole numbers have no gradients to switch off.
    """
    frozen = [
        name
        for name, tensor in model.named_parameters()
        if not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    ]
    if frozen:
        more = f" and {len(frozen) - _NAMED} more" if len(frozen) > _NAMED else ""
        what, are, them = ("parameter", "is", "it") if len(frozen) == 1 else ("parameters", "are", "them")
        raise FedStrataError(
            f"The {what} {', '.join(frozen[:_NAMED])}{more} of the model {are} frozen (requires_grad=False), but all "
            f"parameters are trained here: unfreeze {them} with requires_grad_(True); or compute what the frozen part "
            "gives once, and train the rest on that."
        )


def _construct(
    source: ModelSpec | nn.Module | Callable[..., nn.Module], input_shape: tuple[int, ...], classes: int
) -> nn.Module:
    if isinstance(source, ModelSpec):
        return source.build(input_shape, classes)
    if isinstance(source, nn.Module):
        return copied(source, type(source).__name__)
    if not callable(source):
        raise FedStrataError(
            f"{source!r} is no model; give a name, a model spec, an nn.Module or a function that returns an nn.Module."
        )
    name = getattr(source, "__name__", repr(source))
    required = _required_parameters(source)
    if required not in (0, 2):
        raise FedStrataError(
            f"The model function '{name}' needs {required} arguments; it must take none or two: (input_shape, classes)."
        )
    made: object = source(input_shape, classes) if required else source()
    if not isinstance(made, nn.Module):
        raise FedStrataError(
            f"The model function '{name}' returned a {type(made).__name__}; it must return an nn.Module."
        )
    return made


def _required_parameters(function: Callable[..., object]) -> int:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return sum(parameter.default is parameter.empty and parameter.kind not in optional for parameter in parameters)


def _check(model: nn.Module, name: str, samples: Tensor, classes: int) -> None:
    if not any(True for _ in model.parameters()):
        raise FedStrataError(f"The model '{name}' has no parameters, so there is nothing to train.")
    for part, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise FedStrataError(
                f"'{part}' of the model '{name}' has no size yet; give lazy modules their sizes or run them once."
            )
    with undisturbed(model, name) as copy, torch.no_grad():
        output = forward(copy, samples, name)
    expected = [len(samples), classes]
    if not isinstance(output, Tensor):
        raise FedStrataError(
            f"The model '{name}' returns a {type(output).__name__}; it must return one tensor of class scores, "
            f"of shape {expected} for {len(samples)} samples."
        )
    if list(output.shape) != expected:
        raise FedStrataError(
            f"The model '{name}' turns {len(samples)} samples into an output of shape {list(output.shape)}, but the "
            f"data has {classes} classes and needs {expected}; give its last layer {classes} outputs, or name all "
            "classes with class_names=... where the data lacks some."
        )
    if not output.is_floating_point():
        raise FedStrataError(
            f"The model '{name}' returns {str(output.dtype).removeprefix('torch.')} values, from which nothing can be "
            "learned; it must return class scores, not the class itself."
        )
    if classes > 1 and bool((output >= 0).all()) and torch.allclose(output.sum(1), torch.ones(()).to(output)):
        warnings.warn(
            f"The outputs of the model '{name}' are probabilities, as after a softmax; the loss takes scores and "
            "applies one itself, so that the model would learn slowly: leave the last softmax out.",
            FedStrataWarning,
            stacklevel=2,
        )
