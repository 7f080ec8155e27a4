"""Losses of many clients at once: every tensor has a leading client axis.

The ``loss`` of an experiment is what clients minimise, beside what a method adds to it. Models are tested by its
``test_loss``, the cross entropy unless it says otherwise, whatever they were trained with: so losses can be compared.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.spec import Registry, Spec, parameter
from fedstrata.stack import constant

losses: Registry[Loss] = Registry("loss", "losses")
BALANCED = "balanced"
_WEIGHTS = (
    "What a sample of each class counts: none, all the same; 'balanced', by how rare it is at the client; or numbers "
    "in the order of the classes, such as '1|2.5'."
)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss of every sample ``[K, B]`` from outputs ``[K, B, classes]`` and labels ``[K, B]``."""
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    r"""Compute :math:`T^2 \, \mathrm{KL}(\mathrm{softmax}(v / T) \,\|\, \mathrm{softmax}(w / T))`, the mean over
    samples: ``[K]``.

    The teacher's outputs v and the student's w are ``[K, B, classes]`` (Hinton et al., Distilling the Knowledge in a
    Neural Network, 2015).
    """
    wanted = F.log_softmax(teacher / temperature, dim=-1)
    given = F.log_softmax(student / temperature, dim=-1)
    return temperature**2 * (wanted.exp() * (wanted - given)).sum(-1).mean(-1)


@dataclass(frozen=True)
class Loss(Spec, ABC):
    """What clients minimise, of batches of K clients at once."""

    @abstractmethod
    def samples(self, outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Compute the loss of every sample ``[K, B]`` from outputs ``[K, B, classes]`` and labels ``[K, B]``.

        ``counts`` says how many training samples of each class each client has ``[K, classes]``: all that a loss may
        know of the data beside the batch, and all that a client knows of its own.
        """

    def weights_of(self, labels: Tensor, counts: Tensor) -> Tensor | None:
        """Tell what each sample counts in the mean over its batch ``[K, B]``; none: all the same."""
        return None

    @property
    def judges(self) -> bool:
        """Whether models can be tested by it: what it says of a sample depends on nothing but the sample, and all count
        the same.
        """
        return False

    def check(self, classes: int) -> None:
        """Refuse a number of classes that does not fit."""

    def __call__(self, outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        r"""Compute each client's loss ``[K]``: the mean :math:`\sum_i a_i \ell_i / \sum_i a_i` over its batch."""
        values = self.samples(outputs, labels, counts)
        if not isinstance(values, Tensor) or values.shape != labels.shape:
            got = f"a tensor {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise FedStrataError(
                f"The loss '{self}' must return a number for every sample of every client, {list(labels.shape)}, and "
                f"returned {got}; do not take the mean over samples or clients in it."
            )
        weights = self.weights_of(labels, counts)
        if weights is None:
            return values.mean(1)
        weights = weights.to(values.dtype)
        return (weights * values).sum(1) / weights.sum(1)


class Weighted(Loss):
    """A loss in which the samples of some classes may count more, by its parameter ``weights``."""

    weights: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._given()

    def _given(self) -> tuple[float, ...]:
        """Read weights that are given as numbers."""
        if self.weights is None or self.weights == BALANCED:
            return ()
        try:
            given = tuple(float(piece) for piece in re.split(r"[|,\s]+", self.weights.strip()))
        except ValueError:
            given = ()
        if not given or not all(weight > 0 and math.isfinite(weight) for weight in given):
            raise FedStrataError(
                f"'{self.weights}' does not fit the parameter 'weights' of the loss '{self.name}': it takes none, "
                f"'{BALANCED}', or a number above 0 for each class, such as '1|2.5'."
            )
        return given

    def check(self, classes: int) -> None:
        """Insist on one weight for each class."""
        given = self._given()
        if given and len(given) != classes:
            raise FedStrataError(
                f"The loss '{self}' has {len(given)} weights, but the data has {classes} classes; give one for each."
            )

    @property
    def judges(self) -> bool:
        """Without weights."""
        return self.weights is None

    def class_weights(self, counts: Tensor) -> Tensor | None:
        """Tell what a sample of each class counts ``[K, classes]``, in double precision; none: all the same."""
        if self.weights is None:
            return None
        if self.weights == BALANCED:
            return balanced_weights(counts)
        return constant(self._given(), torch.float64, counts.device).expand(counts.shape)

    def weights_of(self, labels: Tensor, counts: Tensor) -> Tensor | None:
        """Take for each sample the weight of its class."""
        weights = self.class_weights(counts)
        return None if weights is None else weights.gather(1, labels)


def balanced_weights(counts: Tensor) -> Tensor:
    r"""Weigh classes by how rare they are: :math:`n / (C n_c)` for those of a client's C classes ``[K, classes]``.

    It is scikit-learn's rule, with which all classes of a client together count the same. A class that a client lacks
    has the weight 0.

    >>> balanced_weights(torch.tensor([[6, 2, 0]])).tolist()
    [[0.6666666666666666, 2.0, 0.0]]
    """
    held = counts.to(torch.float64)
    number = (held > 0).sum(1, keepdim=True)
    return torch.where(held > 0, held.sum(1, keepdim=True) / (number * held.clamp(min=1)), 0.0)


@losses.register("cross-entropy")
@dataclass(frozen=True)
class CrossEntropy(Weighted):
    r"""The cross entropy :math:`-\log p_y`, of which softmax makes :math:`p`; PyTorch's CrossEntropyLoss.

    With label smoothing :math:`\epsilon` the label is :math:`1 - \epsilon` of it and :math:`\epsilon / C` every class
    (Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016). As in PyTorch, each class of
    a smoothed label has its own weight, and the mean over a batch is divided by the sum of its samples' weights.

    Of two classes it is the binary cross entropy of the difference of the two outputs, and ``weights='1|w'`` does what
    PyTorch calls ``pos_weight=w`` there, but for that divisor.
    """

    label_smoothing: float = parameter(0.0, "The part of a label that is spread over all classes.", low=0, below=1)
    weights: str | None = parameter(None, _WEIGHTS)

    def samples(self, outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Compute the cross entropy with the labels, smoothed or not."""
        plain = cross_entropy(outputs, labels)
        if not self.label_smoothing:
            return plain
        logarithms = -F.log_softmax(outputs, dim=-1)
        weights = self.class_weights(counts)
        if weights is None:
            spread = logarithms.mean(-1)
        else:  # divided by the weight of the label, with which the sample is weighed afterwards
            weights = weights.to(outputs.dtype)
            spread = (weights[:, None] * logarithms).mean(-1) / weights.gather(1, labels)
        return (1 - self.label_smoothing) * plain + self.label_smoothing * spread


@losses.register("focal")
@dataclass(frozen=True)
class Focal(Weighted):
    r"""The focal loss :math:`-(1 - p_y)^\gamma \log p_y`, in which samples that are right already count less.

    Lin et al., Focal Loss for Dense Object Detection, ICCV 2017, with the softmax over all classes. With
    :math:`\gamma = 0` it is the cross entropy. Weights are the paper's :math:`\alpha`.

    Defaults:
        gamma: paper, Section 3.2.
    """

    gamma: float = parameter(2.0, "How much less.", low=0)
    weights: str | None = parameter(None, _WEIGHTS)

    def samples(self, outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Weigh the cross entropy of each sample by how wrong it is."""
        plain = cross_entropy(outputs, labels)
        wrong = -torch.expm1(-plain)
        return wrong.clamp(min=torch.finfo(wrong.dtype).tiny) ** self.gamma * plain


@losses.register("focal-of-all")
@dataclass(frozen=True)
class FocalOfAll(Weighted):
    r"""A focal loss that every class has a part in, not that of the label alone:
    :math:`-\frac{s}{C} \log p_y \sum_c a_c (1 - q_c)^\gamma`.

    Of the label it has :math:`q_c = p_c` and :math:`a_c = \alpha_c`, of all others :math:`q_c = 1 - p_c` and
    :math:`a_c = 1 - \alpha_c`: a class that is wrongly held likely counts, too. It is what the released code of
    PLayer-FL (Elhussein and Gürsoy, 2025) calls multiclass focal loss. Weights :math:`\alpha_c` divide no sum, so the
    loss is as small as they are; without any they are 1, and it is :class:`Focal` times :math:`s / C`.

    Defaults:
        gamma, scale: code; its experiments take gamma 1 and 3.
    """

    gamma: float = parameter(3.0, "How much less samples count that are right already.", low=0)
    weights: str | None = parameter(
        None, "What the label's class counts: a number up to 1 for each, such as '0.2|0.8'."
    )
    scale: float = parameter(10.0, "By what the loss is multiplied.", above=0)

    def _given(self) -> tuple[float, ...]:
        given = super()._given()
        if self.weights == BALANCED or any(weight > 1 for weight in given):
            raise FedStrataError(
                f"'{self.weights}' does not fit the parameter 'weights' of the loss '{self.name}': other classes count "
                "1 - weight, so it takes none, or a number above 0 and up to 1 for each class, such as '0.2|0.8'."
            )
        return given

    @property
    def judges(self) -> bool:
        """With weights, too, which are the same for all clients."""
        return True

    def weights_of(self, labels: Tensor, counts: Tensor) -> None:
        """All samples count the same in a batch: weights are part of the loss of each."""

    def samples(self, outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Weigh the cross entropy of each sample by how wrong it is in each class."""
        chances = outputs.softmax(-1)
        of_label = torch.arange(outputs.shape[-1], device=labels.device) == labels[..., None]
        wrong = torch.where(of_label, 1 - chances, chances).clamp(min=torch.finfo(chances.dtype).tiny) ** self.gamma
        weights = self.class_weights(counts)
        if weights is not None:
            own = weights[:, None].to(wrong.dtype)
            wrong = torch.where(of_label, own, 1 - own) * wrong
        else:
            wrong = of_label * wrong
        return self.scale * wrong.mean(-1) * cross_entropy(outputs, labels)


@losses.register("logit-adjusted")
@dataclass(frozen=True)
class LogitAdjusted(Loss):
    r"""The cross entropy of the outputs plus :math:`\tau \log \pi_c`, with the part :math:`\pi_c` of class c of the
    client's own training samples.

    Menon et al., Long-Tail Learning via Logit Adjustment, ICLR 2021. A model learns what speaks for a class beyond its
    being frequent here, so that clients with different classes learn towards one goal; a class that a client lacks has
    no part in its softmax. With :math:`\tau = 1` it is the balanced softmax (Ren et al., NeurIPS 2020).

    Defaults:
        tau: paper, Section 4.2.
    """

    tau: float = parameter(1.0, "How much the frequency of a class is taken off.", above=0)

    def samples(self, outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Compute the cross entropy of the adjusted outputs."""
        parts = counts / counts.sum(1, keepdim=True)
        return cross_entropy(outputs + self.tau * parts.to(outputs.dtype).log()[:, None], labels)


@losses.register("multi-margin")
@dataclass(frozen=True)
class MultiMargin(Weighted):
    r"""The hinge loss of several classes, :math:`\frac{1}{C} \sum_{c \neq y} \max(0, m - o_y + o_c)^p`; PyTorch's
    MultiMarginLoss.

    Weston and Watkins, Support Vector Machines for Multi-Class Pattern Recognition, ESANN 1999. Outputs are scores
    here: their softmax, which probabilities and test losses are made of, is not what is trained.
    """

    margin: float = parameter(1.0, "By how much the output of the label must exceed the others.", above=0)
    p: int = parameter(1, "The power of what is lacking.", choices=(1, 2))
    weights: str | None = parameter(None, _WEIGHTS)

    def samples(self, outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Sum up what each output lacks of its distance from that of the label."""
        own = outputs.gather(-1, labels[..., None])
        lacking = (self.margin - own + outputs).clamp(min=0) ** self.p
        others = torch.arange(outputs.shape[-1], device=labels.device) != labels[..., None]
        return (lacking * others).mean(-1)
