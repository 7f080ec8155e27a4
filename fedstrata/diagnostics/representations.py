"""Whether clients' models see the same things in the same samples: centred kernel alignment of their layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import Quantity, Seen, diagnostics
from fedstrata.diagnostics.where_to_federate import WhereToFederate, mark, number
from fedstrata.errors import FedStrataError
from fedstrata.layers import Layer, LayerMap
from fedstrata.methods.contract.views import Probe
from fedstrata.spec import parameter
from fedstrata.stack import repeat

_ROUNDING = 1e-12


def linear_cka(first: Tensor, second: Tensor) -> Tensor:
    r"""Compare two representations of the same n samples, ``[n, ...]`` each: linear centred kernel alignment.

    :math:`\lVert Y^\top X \rVert_F^2 / (\lVert X^\top X \rVert_F \lVert Y^\top Y \rVert_F)` with centred columns: 1
    where one is a rotation and scaling of the other, 0 where they have nothing in common, NaN where one is the same for
    all samples.

    Citation: Kornblith et al., "Similarity of neural network representations revisited", ICML 2019, which PLayer-FL
    cites for its Eq. A.3; the squares that are printed in the denominator there would leave a number that depends on
    the scale.

    >>> features = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]])
    >>> linear_cka(features, 3 * features.flip(1))
    tensor(1.)
    """
    if first.dim() < 2 or second.dim() < 2 or len(first) != len(second):
        raise FedStrataError(
            f"Representations of the shapes {list(first.shape)} and {list(second.shape)} cannot be compared; give two "
            "of the same samples, [n, features] each."
        )
    grams = []
    for given in (first, second):
        flat = given.flatten(1).double()
        flat = flat - flat.mean(0)
        grams.append(flat @ flat.T)
    return gram_alignment(torch.stack(grams))[0, 1].to(first.dtype)


def gram_alignment(grams: Tensor, others: Tensor | None = None) -> Tensor:
    r"""Compare K representations pairwise, or with M others, by their centred Gram matrices ``[K, n, n]``: ``[K, M]``.

    :math:`\langle K, L \rangle_F / (\lVert K \rVert_F \lVert L \rVert_F)`, which for :math:`K = X X^\top` is
    :func:`linear_cka`.
    """
    rows, columns = (_unit(given) for given in (grams, grams if others is None else others))
    aligned: Tensor = rows @ columns.T
    return aligned.clamp(max=1)


def _unit(grams: Tensor) -> Tensor:
    flat = grams.flatten(1)
    norms = flat.norm(dim=1, keepdim=True)
    unit: Tensor = flat / norms.where(norms > 0, math.nan)
    return unit


def dissimilarity(aligned: Tensor) -> Tensor:
    """Turn alignments into their distance from 1; what lies within the rounding of equal models is 0.

    >>> dissimilarity(torch.tensor([1.0, 0.75, 1 - 2e-16], dtype=torch.float64))
    tensor([0.0000, 0.2500, 0.0000], dtype=torch.float64)
    """
    return (1 - aligned).masked_fill(1 - aligned < _ROUNDING, 0)


def mean_of_others(pairs: Tensor) -> Tensor:
    """Take each client's mean over all others of numbers of pairs ``[K, K]``: ``[K]``, NaN where there is no other.

    Pairs whose number is NaN are left out.

    >>> mean_of_others(torch.tensor([[0.0, 1.0, 3.0], [1.0, 0.0, 2.0], [3.0, 2.0, 0.0]]))
    tensor([2.0000, 1.5000, 2.5000])
    """
    itself = torch.eye(len(pairs), dtype=torch.bool, device=pairs.device)
    return pairs.masked_fill(itself, math.nan).nanmean(1)


@diagnostics.register("cka")
@dataclass(frozen=True)
class RepresentationDissimilarity(WhereToFederate):
    """How differently clients' models represent the same samples, layer by layer (PLayer-FL, Eq. A.3), and the split.

    ``cka.dissimilarity`` is 1 - CKA between the outputs of a layer in the models of two participants, as local training
    left them, in the mean over all pairs; of a client, over all others, as in Figures 3, A.7 and A.8. ``cka.to_global``
    is the same between the participants' models and the new global one, for the layers before which everything
    travelled. All models see the same ``samples``: training samples of the participants in turn, as their owners
    prepare them, in evaluation mode; the released code takes 32, and compares by another measure, an angle after the
    best rotation. With fewer samples than features CKA comes out high, so compare layers and rounds of one setting, not
    numbers of different ones. What gives the same for all samples, as a dead layer or an embedding of positions does,
    compares with nothing: such a client is left out of the layer's mean, and such a layer adds nothing to the split.

    Cost: one forward pass of the samples in each participant's model and the global one, and for each layer
    8 * ``samples``^2 bytes for each client, whose pairs are then one matrix product.
    """

    curve: ClassVar[str] = "cka.dissimilarity"
    undefined: ClassVar[str] = "there are no two clients to compare, or their models give the same for all samples"
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "cka.dissimilarity": Quantity(
            "Dissimilarity of representations (1 - CKA)",
            "How differently the clients' own models represent the same samples after a layer: 0 where they see the "
            "same, up to a rotation, and 1 where they have nothing in common.",
            low=0,
            high=1,
        ),
        "cka.to_global": Quantity(
            "Dissimilarity to the global model (1 - CKA)",
            "How differently a client's own model and the new global one represent the same samples after a layer: 0 "
            "where averaging kept what the client sees, 1 where nothing of it is left.",
            low=0,
            high=1,
        ),
        "cka.federated": mark("dissimilarity of representations"),
        "cka.split": number("dissimilarity of representations"),
    }

    samples: int = parameter(64, "Samples that all models are compared on.", low=3)

    def measure(self, seen: Seen, probe: Probe, layers: Sequence[Layer]) -> Mapping[str, Tensor]:
        """Compare all pairs of the participants' models, and each with the global one."""
        names = [layer.name for layer in layers]
        grams = probe.representations(seen.trained, names, self.samples)
        found = {
            "cka.dissimilarity": torch.stack(
                [mean_of_others(dissimilarity(gram_alignment(grams[name]))) for name in names], 1
            )
        }
        reached = reached_by_all(seen.layers, seen.travelled & seen.after.keys())
        if reached:
            known = {name: seen.after.get(name, own[0]) for name, own in seen.trained.items()}
            common = probe.representations(repeat(known, 1), names, self.samples)
            to_global = torch.full_like(found["cka.dissimilarity"], math.nan)
            for place, name in enumerate(names):
                if name in reached:
                    to_global[:, place] = dissimilarity(gram_alignment(grams[name], common[name]))[:, 0]
            found["cka.to_global"] = to_global
        return found

    def of_all(self, quantity: str, values: Tensor) -> Tensor:
        """Take the mean over the clients that can be compared."""
        return values.nanmean(0)

    def marks(self, values: Tensor, layers: Sequence[Layer]) -> tuple[dict[str, float], float]:
        """Mark the layers to federate; one that compares with nothing adds nothing."""
        return super().marks(values if values.isnan().all() else values.nan_to_num(0.0), layers)


def reached_by_all(layers: LayerMap, travelled: frozenset[str]) -> frozenset[str]:
    """Name the layers before whose output every tensor is one of those that travelled."""
    reached = []
    for layer in layers.layers:
        if not travelled.issuperset((*layer.names, *layer.tied)):
            break
        reached.append(layer.name)
    return frozenset(reached)
