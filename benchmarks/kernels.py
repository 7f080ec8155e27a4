"""Check the GPU kernels against float64, and time them against PyTorch's operations, at the sizes of real training.

Convolutions have a script of their own. Run on a machine with a GPU:

    python benchmarks/kernels.py
    python benchmarks/kernels.py pooling pictures       only some of: norms, pooling, optimisers, pictures

Each line tells the time of the operations without the kernel, of the kernel, and the floor: the bytes that must move,
each input read once and each output written once, at the bandwidth that doubling a large tensor reaches, which is
measured first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedstrata.data import from_arrays
from fedstrata.data.pictures import make_inputs
from fedstrata.data.transforms import Transform, parse_transforms
from fedstrata.engines import norms, pooling
from fedstrata.fused import Windows
from fedstrata.kernels import finding
from fedstrata.optimisers import optimisers
from fedstrata.rng import client_keys


@dataclass(frozen=True)
class Row:
    """One operation: its times in milliseconds, the bytes it must move, and how far it is from the exact result."""

    name: str
    plain: float
    kernel: float
    moved: int
    error: float

    def show(self, bandwidth: float) -> None:
        """Print a line of the table."""
        floor = self.moved / bandwidth * 1e3
        print(
            f"{self.name:58} {self.plain:8.3f} {self.kernel:8.3f} {floor:8.3f} {self.plain / self.kernel:6.1f} "
            f"{self.error:9.1e}",
            flush=True,
        )


def milliseconds(call: Callable[[], object], repeats: int = 12, calls: int = 4) -> float:
    """Time a call on the device alone, without its launches: recorded several times in a CUDA graph; the median."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return sorted(times[2:])[repeats // 2]


def without_kernels(*files: str) -> None:
    """Let the general operations run instead of some kernels."""
    for file in files:
        finding._FOUND[file] = None


def with_kernels(*files: str) -> None:
    """Look for the kernels again."""
    for file in files:
        finding._FOUND.pop(file, None)


def bandwidth() -> float:
    """Measure the bytes per second of a large product, those read and those written."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: torch.mul(source, 2, out=target)) * 1e3


def distance(ours: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> float:
    """Return the largest relative distance of results from the exact ones; infinite where one is not a number."""
    pairs = [(a.double(), b.double()) for a, b in zip(ours, exact, strict=True) if a is not None and b is not None]
    largest = max(((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs)
    return largest if largest == largest else float("inf")


def both_ways(
    name: str, file: str, call: Callable[..., Tensor], tensors: Sequence[Tensor | None], extra_back: int = 0
) -> list[Row]:
    """Time a differentiable operation forwards and backwards, without the kernel and with it."""
    given = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
    learned = [tensor for tensor in given if tensor is not None]
    exact_inputs = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]
    without_kernels(file)
    exact = call(*exact_inputs)
    gradient = torch.randn_like(call(*given))
    exact_gradients = torch.autograd.grad(
        exact, [tensor for tensor in exact_inputs if tensor is not None], gradient.double()
    )
    times: dict[bool, tuple[float, float]] = {}
    for kernel in (False, True):
        (with_kernels if kernel else without_kernels)(file)
        outputs = call(*given)
        own = torch.empty_like(outputs).copy_(gradient)  # as it lies where the next layer's gradient comes from
        gradients = torch.autograd.grad(outputs, learned, own)
        if kernel:
            errors = distance([outputs], [exact]), distance(gradients, exact_gradients)
            again = torch.autograd.grad(call(*given), learned, own)
            assert all(map(torch.equal, gradients, again)), f"{name} does not repeat bit for bit"
        del outputs, gradients
        forwards = milliseconds(lambda: call(*given))
        both = milliseconds(lambda own=own: torch.autograd.grad(call(*given), learned, own))
        times[kernel] = forwards, both - forwards
    read = sum(tensor.nbytes for tensor in learned)
    moved = read + gradient.nbytes, read + gradient.nbytes + extra_back + read
    return [
        Row(f"{name}, {way}", times[False][place], times[True][place], moved[place], errors[place])
        for place, way in enumerate(("forward", "backward"))
    ]


def laid(clients: int, channels: int, batch: int, side: int, dtype: torch.dtype) -> Tensor:
    """Draw images ``[K, B, C, H, W]`` that lie in memory as engines leave them: ``[K, C, B, H, W]``."""
    return torch.randn(clients, channels, batch, side, side, device="cuda").add(0.3).to(dtype).transpose(1, 2)


def norm_rows(dtype: torch.dtype) -> list[Row]:
    """Time batch norm of ResNet-8 of 100 clients and group norm of ResNet-18 of 10 clients."""
    rows = []
    kind = str(dtype).removeprefix("torch.")
    for channels, side, added in ((64, 16, False), (64, 8, False), (64, 8, True), (128, 4, True), (256, 2, True)):
        images = laid(100, channels, 100, side, dtype)
        other = laid(100, channels, 100, side, dtype) if added else None
        weight, bias = (torch.rand(100, channels, device="cuda") + 0.5 for _ in range(2))

        def batch_norm(images: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None) -> Tensor:
            return norms._batch_norm_stack(images, None, None, weight, bias, other, True, 0.1, 1e-5, True)

        name = f"batch norm{' + add' if added else ''} + relu, 100 x {channels} x 100 x {side}^2, {kind}"
        rows += both_ways(name, "batch_norm", batch_norm, (images, weight, bias, other))
    images = laid(100, 64, 100, 16, dtype)
    weight, bias = (torch.rand(100, 64, device="cuda") + 0.5 for _ in range(2))
    windows = Windows((3, 3), (2, 2), (1, 1))

    def pooled_norm(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return norms._batch_norm_stack(images, None, None, weight, bias, None, True, 0.1, 1e-5, True, windows)

    name = f"batch norm + relu + max-pool, 100 x 64 x 100 x 16^2, {kind}"
    forwards, backwards = both_ways(name, "batch_norm", pooled_norm, (images, weight, bias))
    small = images.nbytes // 4 + images.numel() // 4
    rows += [replace(forwards, moved=images.nbytes + small), replace(backwards, moved=2 * images.nbytes + small)]
    if dtype == torch.bfloat16:
        return rows
    for channels, side, added in ((64, 32, False), (64, 32, True), (128, 16, True), (256, 8, True), (512, 4, True)):
        images = laid(10, channels, 16, side, dtype)
        other = laid(10, channels, 16, side, dtype) if added else None
        weight, bias = (torch.rand(10, channels, device="cuda") + 0.5 for _ in range(2))

        def group_norm(images: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None) -> Tensor:
            return norms._group_norm_stack(images, weight, bias, other, 32, 1e-5, images.dtype, True)

        name = f"group norm{' + add' if added else ''} + relu, 10 x {channels} x 16 x {side}^2, {kind}"
        rows += both_ways(name, "group_norm", group_norm, (images, weight, bias, other))
    return rows


def pooling_rows(dtype: torch.dtype) -> list[Row]:
    """Time the pooling of ResNet-8's stem."""
    images = laid(100, 64, 100, 16, dtype)
    name = f"max-pool 3/2/1, 100 x 64 x 100 x 16^2, {str(dtype).removeprefix('torch.')}"
    forwards, backwards = both_ways(
        name, "pooling", lambda images: pooling.max_pool_stack(images, (3, 3), (2, 2), (1, 1)), (images,)
    )
    bytes_back = images.nbytes + images.nbytes // 4 + images.numel() // 4
    return [forwards, replace(backwards, moved=bytes_back)]


def optimiser_rows() -> list[Row]:
    """Time a step on weights like those of ResNet-18 of 10 clients."""
    rows = []
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    shapes = [(outputs, inputs, 3, 3) for inputs, outputs in zip((64, *widths), widths, strict=False) for _ in range(2)]
    shapes += [(width,) for width in widths for _ in range(5)]
    for text in (
        "sgd",
        "sgd(momentum=0.9, weight_decay=0.0005)",
        "sgd(momentum=0.9, weight_decay=0.0005, clip=10)",
        "adam(clip=1)",
    ):
        optimiser = optimisers.make(text)
        draw = {str(place): torch.randn(10, *shape, device="cuda") for place, shape in enumerate(shapes)}
        gradients = {name: torch.randn_like(tensor) for name, tensor in draw.items()}
        rate = torch.full((), 0.01, dtype=torch.float64, device="cuda")

        def stepped(dtype: torch.dtype) -> list[Tensor]:
            weights = {name: tensor.to(dtype, copy=True) for name, tensor in draw.items()}  # noqa: B023
            slopes = {name: tensor.to(dtype) for name, tensor in gradients.items()}  # noqa: B023
            state = optimiser.state(weights)  # noqa: B023
            for _ in range(3):
                optimiser.update_(weights, slopes, state, rate)  # noqa: B023
            return [*weights.values(), *state.values()]

        weights = {name: tensor.clone() for name, tensor in draw.items()}
        state = optimiser.state(weights)
        without_kernels("updates")
        exact = stepped(torch.float64)
        plain = milliseconds(lambda: optimiser.update_(weights, gradients, state, rate))  # noqa: B023
        with_kernels("updates")
        error = distance(stepped(torch.float32), exact)
        kernel = milliseconds(lambda: optimiser.update_(weights, gradients, state, rate))  # noqa: B023
        once = sum(tensor.nbytes for tensor in draw.values())
        streams = 3 + 2 * len([name for name in state if not name.startswith("steps/")]) // len(draw)
        rows.append(Row(text, plain, kernel, once * (streams + (optimiser.clip is not None)), error))
    return rows


def picture_rows() -> list[Row]:
    """Time the making of 100 batches of 100 images of CIFAR's size."""
    samples = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8, device="cuda")
    dataset = from_arrays(samples[:40].cpu(), torch.arange(40) % 4, name="random")
    positions = torch.randint(0, len(samples), (100, 100), device="cuda")
    keys = client_keys(0, 1, range(100), "transforms", "cuda")
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    rows = []
    for text in ("normalise:imagenet", "flip+crop+normalise:imagenet"):

        def make(chosen: Sequence[Transform] = parse_transforms(text)) -> Tensor:
            return make_inputs(chosen, samples, positions, torch.float32, dataset, keys, step)

        without_kernels("pictures")
        exact, plain = make(), milliseconds(make)
        with_kernels("pictures")
        made, kernel = make(), milliseconds(make)
        moved = made.nbytes + made.numel()
        rows.append(
            Row(f"{text}, 100 x 100 x 3 x 32^2", plain, kernel, moved, 0.0 if torch.equal(made, exact) else 1.0)
        )
    return rows


def main() -> None:
    """Print the table."""
    if not torch.cuda.is_available():
        sys.exit("This measures GPU kernels; there is no GPU here.")
    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: {speed / 1e12:.2f} TB/s at most")
    print(f"{'milliseconds':58} {'plain':>8} {'kernel':>8} {'floor':>8} {'ratio':>6} {'error':>9}")
    tables: dict[str, list[Callable[[], list[Row]]]] = {
        "norms": [partial(norm_rows, torch.float32), partial(norm_rows, torch.bfloat16)],
        "pooling": [partial(pooling_rows, torch.float32), partial(pooling_rows, torch.bfloat16)],
        "optimisers": [optimiser_rows],
        "pictures": [picture_rows],
    }
    for name in sys.argv[1:] or tables:
        for measure in tables[name]:
            for row in measure():
                row.show(speed)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
