"""Losses of many clients at once: every tensor has a leading client axis."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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
