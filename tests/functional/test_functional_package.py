"""What holds for all functions: examples that run, one answer on every device."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedstrata import functional

MODULES = [
    "fedstrata.functional",
    *(f"fedstrata.functional.{module.name}" for module in pkgutil.iter_modules(functional.__path__)),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", functional.__all__)
def test_every_function_has_a_citation_and_an_example(name: str) -> None:
    documentation = inspect.getdoc(getattr(functional, name)) or ""
    assert "Citation: " in documentation
    assert f">>> {name}(" in documentation or f"{name}(" in documentation.split(">>>", 1)[1]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sparsity_at", ["round", "total", "tau0"]),
        ("sensitivity", ["before", "after"]),
        ("keep_mask", ["scores", "drop"]),
        ("saliency", ["grad", "weight"]),
        ("aggregate_scores", ["scores", "sizes"]),
        ("top_mask", ["scores", "sparsity"]),
        ("shrink_factor", ["weight", "updates", "shares", "beta"]),
        ("shrink", ["old", "merged", "factor", "mode"]),
        ("federation_sensitivity", ["weights", "grads"]),
        ("split_point", ["sensitivity", "threshold"]),
        ("fisher", ["grads_per_sample"]),
        ("select", ["scores", "sparsity", "rule"]),
    ],
)
def test_order_of_arguments(name: str, arguments: list[str]) -> None:
    parameters = inspect.signature(getattr(functional, name)).parameters.values()
    assert [item.name for item in parameters if item.kind is not item.KEYWORD_ONLY] == arguments


def all_results(stack: Tensor) -> Iterator[object]:
    """Every function on a stack [K, ...] with many ties."""
    yield functional.sensitivity(stack, stack + 1)
    yield functional.saliency(stack, stack)
    yield functional.keep_mask(stack[0], 0.3)
    yield functional.keep_mask(stack, 0.3, batched=True)
    yield functional.aggregate_scores(stack, range(1, len(stack) + 1))
    yield functional.top_mask(stack, 0.7)
    yield functional.top_mask({"a": stack[:, :2], "b": stack[:, 2:]}, 0.7, batched=True)["b"]
    yield functional.shrink_factor(stack[0], stack, [1 / len(stack)] * len(stack), 0.1)
    yield functional.shrink(stack[0], stack[1], 0.5, "opt")
    yield functional.federation_sensitivity([stack, stack[:, 0]], [stack, stack[:, 1]], batched=True)
    yield functional.split_point(functional.federation_sensitivity([stack[0], stack[1]], [stack[0], stack[1]]), 1.5)
    yield functional.fisher(stack)
    yield functional.layer_masks({"a": stack[:, :2], "b": stack[:, 2, 0]}, [0.4, 0.6], batched=True)["a"]
    yield functional.prune(stack > 0, stack, torch.arange(len(stack), device=stack.device), batched=True)
    yield functional.regrow(stack > 0, stack, 2, batched=True)
    yield functional.readjust(stack > 0, stack, -stack, 0.3, batched=True)
    yield functional.overlaps({"a": stack > 0, "b": stack > 1})
    yield functional.overlap(stack[0] > 0, stack[1] > 0)
    for rule in ("least", "most", "lowest-magnitude", "highest-magnitude", "random"):
        yield functional.select(stack, 0.4, rule)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gpu_gives_the_answers_of_the_cpu(dtype: torch.dtype, deterministic: bool) -> None:
    stack = torch.randint(-3, 4, (5, 4, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.use_deterministic_algorithms(deterministic)
    try:
        for here, there in zip(all_results(stack), all_results(stack.cuda()), strict=True):
            if isinstance(here, Tensor):
                assert isinstance(there, Tensor)
                assert there.is_cuda
                torch.testing.assert_close(there.cpu(), here)
            else:
                assert there == pytest.approx(here, rel=1e-12)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_precisions_agree_on_whole_numbers(dtype: torch.dtype) -> None:
    stack = torch.randint(-3, 4, (5, 4, 6), generator=torch.Generator().manual_seed(0))
    for exact, result in zip(all_results(stack.double()), all_results(stack.to(dtype)), strict=True):
        if isinstance(exact, Tensor):
            assert isinstance(result, Tensor)
            torch.testing.assert_close(result.double(), exact.double(), rtol=1e-6, atol=1e-6)
        else:
            assert result == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_arguments_are_not_changed(dtype: torch.dtype) -> None:
    stack = torch.randint(-3, 4, (5, 4, 6)).to(dtype)
    before = stack.clone()
    for _ in all_results(stack):
        assert torch.equal(stack, before)
