"""Any model of the package ``timm`` by its name.

"PyTorch Image Models" (Wightman, 2019, https://github.com/huggingface/pytorch-image-models).
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedstrata.errors import FedStrataError, NotHereError, nearest
from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import image_channels
from fedstrata.models.trial import first_line
from fedstrata.models.weights import WEIGHTS, find_weights, load_backbone
from fedstrata.spec import parameter


@models.register("timm")
@dataclass(frozen=True)
class TimmSpec(ModelSpec):
    """A model of the package timm by its name, such as timm:resnet10t, for the channels and classes of the data.

    "PyTorch Image Models" (Wightman, 2019). Vision transformers and others that are made for one size of images are
    made for that of the data. Weights are drawn as timm does it, or read from a file; nothing is fetched. A model that
    draws random numbers in training other than by dropout, such as for stochastic depth, is refused when it is
    trained, as any other. Needs the extra ``timm``.
    """

    architecture: str | None = parameter(None, "The name of the model in timm, without that of pretrained weights.")
    weights: str | None = parameter(None, WEIGHTS, local=True)

    def find(self) -> Path | None:
        """See that timm is installed, and find the file of the weights, if there is to be one."""
        if importlib.util.find_spec("timm") is None:
            raise _not_installed()
        return find_weights(self.weights, self.name)

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        if self.architecture is None:
            raise FedStrataError("The model 'timm' needs the name of a model of timm, such as timm:resnet10t.")
        timm = _timm()
        # timm takes the address of a repository for a name, and would fetch from there.
        if not timm.is_model(self.architecture):
            near = nearest(self.architecture, timm.list_models())
            hint = "" if near is None else f" (did you mean '{near}'?)"
            raise FedStrataError(
                f"timm {timm.__version__} has no model '{self.architecture}'{hint}; timm.list_models() in Python lists "
                "all."
            )
        channels = image_channels(self.name, input_shape, smallest=1)
        described = timm.get_pretrained_cfg(self.architecture)
        fixed = described is not None and described.fixed_input_size
        sizes = {"img_size": input_shape[1:]} if fixed else {}
        try:
            model: nn.Module = timm.create_model(
                self.architecture, pretrained=False, in_chans=channels, num_classes=classes, **sizes
            )
        # What the thousand models of timm raise for sizes that they cannot take has no base in common.
        except Exception as error:
            raise FedStrataError(
                f"timm cannot build '{self.architecture}' for images of the shape {input_shape} and {classes} classes: "
                f"{first_line(error)}"
            ) from error
        weights = find_weights(self.weights, self.name)
        return model if weights is None else load_backbone(model, weights, _heads(model))


def _timm() -> Any:
    """Import timm; where it is missing, or something that it imports is, the error names what."""
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name in (None, "timm"):
            raise _not_installed() from None
        raise FedStrataError(
            f"The package timm is installed, but finds no {error.name}, which it imports; install a version of "
            f"{str(error.name).split('.')[0]} that fits your PyTorch."
        ) from error
    except Exception as error:  # such as where torchvision, which timm imports, is of another version than PyTorch
        raise FedStrataError(
            f"The package timm is installed, but cannot be imported: {first_line(error)} Install versions of timm, "
            "torchvision and PyTorch that fit each other."
        ) from error


def _not_installed() -> NotHereError:
    brief = "the package timm, which the model 'timm' needs; install it with: pip install 'fedstrata[timm]'."
    return NotHereError(
        "The model 'timm' needs the package timm; install it with: pip install 'fedstrata[timm]'.", brief
    )


def _heads(model: nn.Module) -> tuple[str, ...]:
    """Name the modules that timm calls the classifier of a model, one or several."""
    named = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    return (named,) if isinstance(named, str) else tuple(named)
