"""The implicit convolutions in Triton: in its interpreter where it is installed, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedstrata.engines.convolution import WAYS, StackedConvolution, forward_by, images_by, weights_by

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GEOMETRIES = [
    {"channels": 17, "outputs": 5, "kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "size": (5, 4)},
    {"channels": 3, "outputs": 4, "kernel": (7, 7), "stride": (2, 2), "padding": (3, 3), "size": (9, 8)},
    {"channels": 2, "outputs": 3, "kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "size": (8, 8)},
    {"channels": 5, "outputs": 20, "kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "size": (7, 5)},
    {"channels": 4, "outputs": 3, "kernel": (1, 1), "stride": (2, 2), "padding": (0, 0), "size": (6, 5)},
    {"channels": 33, "outputs": 18, "kernel": (2, 5), "stride": (1, 3), "padding": (1, 0), "size": (3, 6)},
    {"channels": 1, "outputs": 2, "kernel": (2, 2), "stride": (3, 3), "padding": (3, 3), "size": (4, 1)},
    {"channels": 6, "outputs": 2, "kernel": (3, 2), "stride": (3, 1), "padding": (0, 2), "size": (6, 2)},
]


def draw(geometry, clients, batch, device="cpu", dtype=torch.float32, order=False):
    """Images, weights and a gradient; with ``order`` the images and the gradient lie in memory batch first."""
    generator = torch.Generator().manual_seed(len(str(geometry)))
    rows, across = (
        (geometry["size"][axis] + 2 * geometry["padding"][axis] - geometry["kernel"][axis]) // geometry["stride"][axis]
        + 1
        for axis in (0, 1)
    )
    shapes = (
        (clients, geometry["channels"], batch, *geometry["size"]),
        (clients, geometry["outputs"], geometry["channels"], *geometry["kernel"]),
        (clients, geometry["outputs"], batch, rows, across),
    )
    images, weights, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    if order:
        images, gradient = (
            tensor.permute(2, 0, 1, 3, 4).contiguous().permute(1, 2, 0, 3, 4) for tensor in (images, gradient)
        )
    return images, weights, gradient


def exact(images, weights, gradient, geometry):
    """All three directions in float64, client by client."""
    results = []
    for client in range(len(weights)):
        image = images[client].transpose(0, 1).double().requires_grad_()
        weight = weights[client].double().requires_grad_()
        outputs = F.conv2d(image, weight, None, geometry["stride"], geometry["padding"])
        back = torch.autograd.grad(outputs, (image, weight), gradient[client].transpose(0, 1).double())
        results.append((outputs.detach().transpose(0, 1), back[0].transpose(0, 1), back[1]))
    return [torch.stack(tensors) for tensors in zip(*results, strict=True)]


def worst(results, expected):
    """The largest relative error, and each result has its shape and its numbers."""
    assert [result.shape for result in results] == [right.shape for right in expected]
    return max(
        float((result.double() - right).norm() / right.norm().clamp(min=1e-9))
        for result, right in zip(results, expected, strict=True)
    )


@pytest.fixture
def kernels(monkeypatch):
    """The kernels, run by Triton's interpreter on tensors of the CPU."""
    pytest.importorskip("triton")
    from triton.runtime import interpreter

    from fedstrata.kernels import convolution, rearranging

    def patched(tensor, scope, patch=interpreter._patch_lang_tensor):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data.item()))  # for NumPy 2.4 and newer

    def widened(handle):
        """Return bfloat16, which the interpreter keeps as bits, as the float32 that it is the upper half of."""
        if handle.dtype.scalar != convolution.language.bfloat16:
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype("uint32") << 16).view("float32"), convolution.language.float32
        )

    def dot(builder, left, right, *others, create=interpreter.InterpreterBuilder.create_dot):
        return create(builder, widened(left), widened(right), *others)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    for module in (rearranging, convolution):
        for name, function in list(vars(module).items()):
            if hasattr(function, "fn") and hasattr(function, "arg_names"):
                monkeypatch.setattr(module, name, interpreter.InterpretedFunction(function.fn))
    return convolution


def all_directions(kernels, images, weights, gradient, geometry, precision, rows=16, columns=16, splits=1):
    options = geometry["stride"], geometry["padding"], precision
    tile, shared = kernels.Tile(rows, columns, 16), kernels.Tile(rows, columns, 16, splits=splits)
    return (
        kernels.forward(images, weights, *options, tile),
        kernels.for_images(gradient, weights, images.shape[3:], *options, tile),
        kernels.for_weights(gradient, images, geometry["kernel"], *options, images.dtype, shared),
    )


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_in_the_interpreter_all_directions_are_those_of_pytorch(kernels, geometry):
    drawn = draw(geometry, clients=2, batch=2)
    assert worst(all_directions(kernels, *drawn, geometry, "ieee"), exact(*drawn, geometry)) < 1e-6


@pytest.mark.parametrize("geometry", GEOMETRIES[:4], ids=str)
def test_images_in_another_order_large_tiles_and_shared_sums(kernels, geometry):
    drawn = draw(geometry, clients=2, batch=3, order=True)
    results = all_directions(kernels, *drawn, geometry, "ieee", rows=64, columns=32, splits=3)
    assert worst(results, exact(*drawn, geometry)) < 1e-6


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"), [("tf32", torch.float32, 5e-4), ("tf32", torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("rows", [16, 64])
def test_narrow_numbers(kernels, precision, dtype, tolerance, rows):
    geometry = GEOMETRIES[0]
    drawn = draw(geometry, clients=2, batch=2, dtype=dtype)
    results, expected = all_directions(kernels, *drawn, geometry, precision, rows), exact(*drawn, geometry)
    assert worst(results, expected) < tolerance
    if dtype == torch.float32:
        assert worst(results[2:], expected[2:]) < 3e-5, "factors in two parts are more exact than tf32"
        assert worst(results[:1], expected[:1]) > 1e-6, "rounded to tf32, or this test tests nothing"


def test_weights_more_exact_than_images_are_narrowed_once_and_their_gradient_is_not(kernels):
    geometry = GEOMETRIES[0]
    images, weights, gradient = draw(geometry, clients=2, batch=2)
    images, gradient = images.bfloat16(), gradient.bfloat16()
    options = geometry["stride"], geometry["padding"], "tf32"
    tile, size = kernels.Tile(16, 16, 16), geometry["size"]
    for wide, narrow in (
        (kernels.forward(images, given, *options, tile) for given in (weights, weights.bfloat16())),
        (kernels.for_images(gradient, given, size, *options, tile) for given in (weights, weights.bfloat16())),
    ):
        assert wide.dtype == torch.bfloat16
        assert worst([wide], [narrow]) < 1e-2  # the interpreter cuts bits off where a GPU rounds
    found = kernels.for_weights(gradient, images, geometry["kernel"], *options, torch.float32, tile)
    assert found.dtype == torch.float32
    assert worst([found], exact(images, weights, gradient, geometry)[2:]) < 1e-6


def test_rounding_keeps_what_is_no_number(kernels):
    geometry = GEOMETRIES[4]
    images, weights, gradient = draw(geometry, clients=1, batch=1)
    images[0, 0, 0, 0, 0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # the GPU's own NaN
    outputs = all_directions(kernels, images, weights, gradient, geometry, "tf32")[0]
    assert outputs[0, :, 0, 0, 0].isnan().all()
    assert int(outputs.isnan().sum()) == geometry["outputs"]


def test_tiles_fit_the_shapes(kernels):
    for dtype, precision in ((torch.float32, "tf32"), (torch.float32, "tf32x3"), (torch.bfloat16, "tf32")):
        for channels in (1, 3, 16, 40, 64, 512):
            for outputs in (1, 16, 64, 300):
                tile = kernels.product_tile(7, outputs, kernels.line_of(channels, 3), 100, dtype, precision)
                shared = kernels.weights_tile(7, outputs, channels, (3, 3), 100, dtype, precision)
                for part in (tile, shared):
                    assert all(size & (size - 1) == 0 and size >= 16 for size in (part.rows, part.columns, part.inner))
                    assert part.splits >= 1


@pytest.fixture
def multiplications():
    """Allow tf32 or not, until the test is over."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]

    def allow(tf32):
        for backend in backends:
            backend.allow_tf32 = tf32

    yield allow
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed


@needs_gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "tf32", "tolerance"),
    [(torch.float32, False, 2e-6), (torch.float32, True, 1e-3), (torch.bfloat16, True, 1e-2)],
)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_on_a_gpu_every_way_is_right_and_repeats_bit_for_bit(geometry, dtype, tf32, tolerance, way, multiplications):
    multiplications(tf32)
    options = geometry["stride"], geometry["padding"]
    for order in (False, True):
        images, weights, gradient = draw(geometry, 3, 20, "cuda", dtype, order)

        def compute(images=images, weights=weights, gradient=gradient):
            return (
                forward_by(way, images, weights, *options),
                images_by(way, gradient, weights, images.shape, *options),
                weights_by(way, gradient, images, weights.shape, *options),
            )

        results = compute()
        assert worst(results, exact(images, weights, gradient, geometry)) < tolerance
        assert all(torch.equal(result, again) for result, again in zip(results, compute(), strict=True))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_large_convolutions_are_measured_and_keep_no_windows(dtype, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    from fedstrata.engines import convolution

    convolution._choices.cache_clear()
    geometry = GEOMETRIES[0] | {"channels": 64, "outputs": 64, "size": (32, 32)}
    images, weights, gradient = draw(geometry, 8, 16, "cuda", dtype)
    weights.requires_grad_()
    images.requires_grad_()
    outputs = StackedConvolution.apply(images, weights, (1, 1), (1, 1))
    back = torch.autograd.grad(outputs, (images, weights), gradient)
    expected = exact(images.detach()[:1], weights.detach()[:1], gradient[:1], geometry)
    assert worst([outputs[:1].detach(), *(tensor[:1] for tensor in back)], expected) < 1e-2
    assert len(list((tmp_path / "fedstrata" / convolution._MEASURED).glob("*.json"))) == 1
    convolution._choices.cache_clear()
