"""Where kernels are tested: on the GPU or, without one, on the CPU by Triton's interpreter; skipped without Triton."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="needs Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, learned: bool = True) -> torch.Tensor:
    """Draw the same numbers wherever the test runs."""
    numbers = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, dtype).requires_grad_(learned)


def assert_same_both_ways(
    ours: torch.Tensor, theirs: torch.Tensor, learned: list[torch.Tensor], **close: float
) -> None:
    """Compare results, and the gradients of what was learned."""
    torch.testing.assert_close(ours, theirs, **close)
    slope = draw(*ours.shape, seed=99, dtype=ours.dtype, learned=False)
    gradients = (torch.autograd.grad(outputs, learned, slope, retain_graph=True) for outputs in (ours, theirs))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, **close)
