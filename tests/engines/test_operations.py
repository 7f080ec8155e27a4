from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from fedstrata.engines.operations import (
    CORRECTED_OPERATIONS,
    CPU_OPERATIONS,
    GPU_OPERATIONS,
    attention,
    stacked_operations,
)

pytestmark = pytest.mark.usefixtures("way_out_of_vmap")

CLIENTS, BATCH, CHANNELS = 3, 2, 2


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def per_client(function, *stacks):
    return torch.stack([function(*(stack[client] for stack in stacks)) for client in range(len(stacks[0]))])


def assert_equal_with_gradients(ours, theirs, *stacks, tolerance=1e-11):
    """Compare a function over all clients at once with one client at a time: values and all gradients."""
    results = []
    for function in (ours, theirs):
        leaves = [stack.clone().requires_grad_() for stack in stacks]
        outputs = function(*leaves)
        weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).reshape(outputs.shape)
        results.append((outputs, *torch.autograd.grad((outputs * weights).sum(), leaves)))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


GEOMETRIES = [
    {"kernel": (3, 3), "stride": 1, "padding": 0},
    {"kernel": (3, 3), "stride": 1, "padding": 1},
    {"kernel": (3, 3), "stride": 2, "padding": 1},
    {"kernel": (3, 3), "stride": (2, 1), "padding": (0, 2)},
    {"kernel": (3, 2), "stride": 1, "padding": (2, 1)},
    {"kernel": (2, 5), "stride": (1, 3), "padding": (1, 0)},
    {"kernel": (1, 1), "stride": 1, "padding": 0},
    {"kernel": (1, 1), "stride": 2, "padding": 0},
    {"kernel": (1, 1), "stride": 1, "padding": 1},
    {"kernel": (2, 2), "stride": 1, "padding": 3},
    {"kernel": (2, 2), "stride": 3, "padding": 3},
    {"kernel": (4, 4), "stride": 4, "padding": 0},
    {"kernel": (7, 6), "stride": 1, "padding": 0},
    {"kernel": (3, 3), "stride": (3, 2), "padding": 0},
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["without bias", "with bias"])
def test_convolution(geometry, bias):
    kernel, options = geometry["kernel"], (geometry["stride"], geometry["padding"])
    images, weights = draw(CLIENTS, BATCH, CHANNELS, 7, 6), draw(CLIENTS, 4, CHANNELS, *kernel, seed=1)
    biases = (draw(CLIENTS, 4, seed=2),) if bias else ()

    def stacked(images, weights, *biases):
        return GPU_OPERATIONS[F.conv2d](images, weights, *(biases or (None,)), *options)

    def single(images, weights, *biases):
        return F.conv2d(images, weights, *(biases or (None,)), *options)

    assert_equal_with_gradients(vmap(stacked), lambda *stacks: per_client(single, *stacks), images, weights, *biases)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "same"},
        {"padding": "valid"},
        {"dilation": 2},
        {"dilation": (1, 2), "stride": 2},
        {"groups": 2},
        {"stride": [2, 1], "padding": [1, 1]},
    ],
    ids=str,
)
def test_other_convolutions_are_left_to_the_generic_rule(options):
    images = draw(CLIENTS, BATCH, CHANNELS, 7, 6)
    weights = draw(CLIENTS, 4, CHANNELS // options.get("groups", 1), 3, 3, seed=1)
    assert_equal_with_gradients(
        vmap(lambda images, weight: GPU_OPERATIONS[torch.conv2d](images, weight, **options)),
        lambda *stacks: per_client(lambda images, weight: F.conv2d(images, weight, **options), *stacks),
        images,
        weights,
    )


def test_convolution_of_one_image_without_a_batch_axis():
    images, weights = draw(CLIENTS, CHANNELS, 5, 5), draw(CLIENTS, 4, CHANNELS, 3, 3, seed=1)
    assert_equal_with_gradients(
        vmap(GPU_OPERATIONS[F.conv2d]), lambda *stacks: per_client(F.conv2d, *stacks), images, weights
    )


def test_convolution_where_only_one_side_differs_between_clients():
    image, weights = draw(BATCH, CHANNELS, 5, 5), draw(CLIENTS, 4, CHANNELS, 3, 3, seed=1)
    assert_equal_with_gradients(
        vmap(lambda weight: GPU_OPERATIONS[F.conv2d](image, weight)),
        lambda weights: per_client(lambda weight: F.conv2d(image, weight), weights),
        weights,
    )
    images, weight = draw(CLIENTS, BATCH, CHANNELS, 5, 5), draw(4, CHANNELS, 3, 3, seed=1)
    assert_equal_with_gradients(
        vmap(lambda image: GPU_OPERATIONS[F.conv2d](image, weight)),
        lambda images: per_client(lambda image: F.conv2d(image, weight), images),
        images,
    )


def test_what_is_the_same_for_everybody_stays_so():
    image, weight, own = draw(BATCH, CHANNELS, 5, 5), draw(4, CHANNELS, 3, 3, seed=1), draw(CLIENTS)
    outputs = vmap(lambda scale: scale * GPU_OPERATIONS[F.conv2d](image, weight))(own)
    torch.testing.assert_close(outputs, per_client(lambda scale: scale * F.conv2d(image, weight), own))


def test_convolution_without_a_gradient_for_the_images():
    images, weights = draw(CLIENTS, BATCH, CHANNELS, 5, 5), draw(CLIENTS, 4, CHANNELS, 3, 3, seed=1).requires_grad_()
    outputs = vmap(GPU_OPERATIONS[F.conv2d])(images, weights)
    (gradient,) = torch.autograd.grad(outputs.sum(), weights)
    (expected,) = torch.autograd.grad(per_client(F.conv2d, images, weights).sum(), weights)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    "shape", [(BATCH, CHANNELS, 4, 3), (5, CHANNELS), (BATCH, CHANNELS, 4), (BATCH, CHANNELS, 2, 2, 3)]
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(shape, training, affine):
    inputs, weights, biases = (
        draw(CLIENTS, *shape), draw(CLIENTS, CHANNELS, seed=1), draw(CLIENTS, CHANNELS, seed=2),
    )  # fmt: skip
    means, variances = draw(CLIENTS, CHANNELS, seed=3), draw(CLIENTS, CHANNELS, seed=4).exp()
    own_means, own_variances = means.clone(), variances.clone()
    affine_stacks = (weights, biases) if affine else ()

    def stacked(inputs, *scale):
        def one(inputs, mean, variance, *scale):
            return GPU_OPERATIONS[F.batch_norm](
                inputs, mean, variance, *(scale or (None, None)), training=training, momentum=0.3, eps=1e-3
            )

        return vmap(one)(inputs, means, variances, *scale)

    def single(inputs, *scale):
        return torch.stack(
            [
                F.batch_norm(
                    inputs[client], own_means[client], own_variances[client],
                    *(tuple(stack[client] for stack in scale) or (None, None)),
                    training=training, momentum=0.3, eps=1e-3,
                )
                for client in range(CLIENTS)
            ]
        )  # fmt: skip

    assert_equal_with_gradients(stacked, single, inputs, *affine_stacks)
    torch.testing.assert_close(means, own_means)
    torch.testing.assert_close(variances, own_variances)
    assert torch.equal(means, draw(CLIENTS, CHANNELS, seed=3)) != training


def test_batch_norm_without_running_statistics():
    inputs = draw(CLIENTS, 5, CHANNELS)
    assert_equal_with_gradients(
        vmap(lambda inputs: GPU_OPERATIONS[F.batch_norm](inputs, None, None, training=True)),
        lambda stack: per_client(lambda inputs: F.batch_norm(inputs, None, None, training=True), stack),
        inputs,
    )


@pytest.mark.parametrize("shape", [(BATCH, 4, 4, 3), (BATCH, 4, 5), (BATCH, 4)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("affine", [(), ("weight",), ("weight", "bias")], ids=str)
def test_group_norm(shape, groups, affine):
    stacks = draw(CLIENTS, *shape), *(draw(CLIENTS, 4, seed=seed) for seed, _ in enumerate(affine, start=1))
    ours, theirs = (
        lambda inputs, *scale, norm=norm: norm(inputs, groups, **dict(zip(affine, scale, strict=True)), eps=1e-3)
        for norm in (GPU_OPERATIONS[F.group_norm], F.group_norm)
    )
    assert_equal_with_gradients(vmap(ours), lambda *stacks: per_client(theirs, *stacks), *stacks)


def test_group_norm_of_clients_that_share_inputs_or_weights():
    inputs, weights, biases = draw(BATCH, 4, 3, 3), draw(CLIENTS, 4, seed=1), draw(4, seed=2)
    ours, theirs = (
        lambda weight, norm=norm: norm(inputs, 2, weight, biases)
        for norm in (GPU_OPERATIONS[F.group_norm], F.group_norm)
    )
    assert_equal_with_gradients(vmap(ours), lambda stack: per_client(theirs, stack), weights)


def test_group_norm_under_autocast_computes_in_float32_and_returns_what_it_was_given():
    inputs, weights = draw(CLIENTS, BATCH, 4, 3, 3).to(torch.bfloat16), draw(CLIENTS, 4, seed=1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = vmap(lambda own, weight: GPU_OPERATIONS[F.group_norm](own, 2, weight))(inputs, weights)
    exact = per_client(lambda own, weight: F.group_norm(own.float(), 2, weight), inputs, weights)
    assert outputs.dtype == torch.bfloat16
    torch.testing.assert_close(outputs, exact.to(torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        (2,),
        (3, 2, 1),
        ((2, 3), (1, 2), (1, 0)),
        (2, 2, 0, 2),
        (2, None, 0, 1, True),
        (3, 2, 0, 1, True),
    ],
    ids=str,
)
def test_max_pool(options):
    images = draw(CLIENTS, BATCH, CHANNELS, 7, 5)
    assert_equal_with_gradients(
        vmap(lambda image: GPU_OPERATIONS[F.max_pool2d](image, *options)),
        lambda stack: per_client(lambda image: F.max_pool2d(image, *options), stack),
        images,
    )


def test_max_pool_with_indices_and_without_a_batch_axis():
    images = draw(CLIENTS, BATCH, CHANNELS, 6, 6)
    values, indices = vmap(lambda image: GPU_OPERATIONS[F.max_pool2d](image, 2, return_indices=True))(images)
    for client in range(CLIENTS):
        expected = F.max_pool2d(images[client], 2, return_indices=True)
        assert torch.equal(values[client], expected[0])
        assert torch.equal(indices[client], expected[1])
    alone = vmap(lambda image: GPU_OPERATIONS[F.max_pool2d](image, 2))(images[:, 0])
    assert torch.equal(alone, per_client(lambda image: F.max_pool2d(image, 2), images[:, 0]))


def test_under_autocast_the_arithmetic_is_bfloat16():
    images = draw(CLIENTS, BATCH, CHANNELS, 6, 6).float()
    weights, biases = draw(CLIENTS, 4, CHANNELS, 3, 3, seed=1).float(), draw(CLIENTS, 4, seed=2).float()

    def network(conv2d, batch_norm, max_pool2d):
        def one(image, weight, bias):
            hidden = conv2d(image, weight, bias, 1, 1)
            return max_pool2d(batch_norm(hidden, None, None, training=True), 2)

        return one

    ours = network(*(GPU_OPERATIONS[name] for name in (F.conv2d, F.batch_norm, F.max_pool2d)))
    theirs = network(F.conv2d, F.batch_norm, F.max_pool2d)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, convolved = vmap(ours)(images, weights, biases), vmap(GPU_OPERATIONS[F.conv2d])(images, weights)
        expected = per_client(theirs, images, weights, biases)
    assert convolved.dtype == torch.bfloat16
    assert outputs.dtype == expected.dtype
    torch.testing.assert_close(outputs.float(), expected.float(), rtol=0.1, atol=0.1)
    torch.testing.assert_close(outputs.float(), per_client(theirs, images, weights, biases), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("padding_idx", [None, 0, 4, -1])
def test_embedding_gives_the_padding_row_no_gradient(padding_idx):
    tokens = torch.tensor([[0, 4, 1], [4, 4, 2], [0, 0, 3]])
    weights = draw(CLIENTS, 5, 2)
    assert_equal_with_gradients(
        vmap(lambda weight: CORRECTED_OPERATIONS[F.embedding](tokens, weight, padding_idx)),
        lambda stack: per_client(lambda weight: F.embedding(tokens, weight, padding_idx), stack),
        weights,
    )
    assert_equal_with_gradients(
        lambda stack: vmap(lambda row, weight: CORRECTED_OPERATIONS[F.embedding](row, weight, padding_idx))(
            tokens, stack
        ),
        lambda stack: torch.stack([F.embedding(tokens[row], stack[row], padding_idx) for row in range(CLIENTS)]),
        weights,
    )


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_bags_of_embeddings_equal_those_of_each_client(mode, padding_idx):
    tokens = torch.tensor([[0, 4, 1], [4, 4, 4], [0, 0, 0], [3, 1, 1]])  # one bag of nothing but padding
    bag = CORRECTED_OPERATIONS[F.embedding_bag]
    options = {"mode": mode, "padding_idx": padding_idx}
    assert_equal_with_gradients(
        vmap(lambda weight: bag(tokens, weight, **options)),
        lambda stack: per_client(lambda weight: F.embedding_bag(tokens, weight, **options), stack),
        draw(CLIENTS, 5, 2),
    )


def test_bags_of_embeddings_may_be_weighted_or_given_by_offsets():
    weights, shares = draw(CLIENTS, 5, 2), draw(2, 3)
    tokens = torch.tensor([[0, 4, 1], [3, 4, 2]])
    bag = CORRECTED_OPERATIONS[F.embedding_bag]
    assert_equal_with_gradients(
        vmap(lambda weight: bag(tokens, weight, mode="sum", per_sample_weights=shares)),
        lambda stack: per_client(
            lambda weight: F.embedding_bag(tokens, weight, mode="sum", per_sample_weights=shares), stack
        ),
        weights,
    )
    offsets = torch.tensor([0, 2])
    assert torch.equal(bag(tokens[0], weights[0], offsets), F.embedding_bag(tokens[0], weights[0], offsets))


def test_leaky_rectifier_with_a_drawn_slope_takes_the_mean_slope():
    inputs = draw(CLIENTS, 4)
    outputs = CORRECTED_OPERATIONS[F.rrelu](inputs, 0.1, 0.3)
    assert torch.equal(outputs, F.rrelu(inputs, 0.1, 0.3, training=False))


def test_images_are_replaced_on_a_gpu_and_attention_on_a_cpu():
    assert stacked_operations(torch.device("cpu")) == CORRECTED_OPERATIONS | CPU_OPERATIONS
    assert stacked_operations(torch.device("cuda")) == CORRECTED_OPERATIONS | GPU_OPERATIONS


@pytest.mark.parametrize("shared_keys", [False, True])
def test_attention(shared_keys):
    query, mask = draw(2, 4, 5, 3), draw(5, 5, seed=2)
    key, value = draw(2, 2 if shared_keys else 4, 5, 3, seed=1), draw(2, 2 if shared_keys else 4, 5, 3, seed=3)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": causal}, {"scale": 0.3}):
        outputs = attention(query, key, value, enable_gqa=shared_keys, **options)
        expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=shared_keys, **options)
        torch.testing.assert_close(outputs, expected)


def test_attention_drops_weights():
    query, value = draw(1, 1, 2, 3), draw(1, 1, 2, 3, seed=1)
    nothing_of_the_first = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    outputs = attention(query, query, value, dropout_p=0.5, drop=lambda weights, p: weights * nothing_of_the_first)
    weights = (query @ query.transpose(-2, -1) / 3**0.5).softmax(-1)
    torch.testing.assert_close(outputs, 2 * weights[..., 1:] * value[..., 1:, :])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_fused_attention_for_all_clients(options):
    """Fold the clients into the batch; also where they share the same tokens."""
    query, key, value = (draw(CLIENTS, BATCH, 2, 5, 4, seed=seed) for seed in range(3))
    fused = GPU_OPERATIONS[F.scaled_dot_product_attention]
    assert_equal_with_gradients(
        vmap(lambda *own: fused(*own, **options)),
        lambda *stacks: per_client(lambda *own: F.scaled_dot_product_attention(*own, **options), *stacks),
        query, key, value,
    )  # fmt: skip
    assert_equal_with_gradients(
        vmap(lambda own: fused(own, key[0], value[0], **options)),
        lambda stack: per_client(lambda own: F.scaled_dot_product_attention(own, key[0], value[0], **options), stack),
        query,
    )


def test_batch_norm_of_clients_that_share_their_weights():
    """Weights that are the same for everybody come as a view without a copy for each client."""
    inputs, weight = draw(CLIENTS, BATCH, CHANNELS, 3, 3), draw(CHANNELS, seed=1).expand(CLIENTS, CHANNELS)
    mean, variance = torch.zeros(CLIENTS, CHANNELS).double(), torch.ones(CLIENTS, CHANNELS).double()
    for training in (False, True):
        ours, theirs = (
            lambda *own, norm=norm, training=training: norm(*own, None, training)
            for norm in (GPU_OPERATIONS[F.batch_norm], F.batch_norm)
        )
        expected = per_client(theirs, inputs, mean.clone(), variance.clone(), weight)
        outputs = vmap(ours)(inputs, mean.clone(), variance.clone(), weight)
        torch.testing.assert_close(outputs, expected, rtol=1e-11, atol=1e-11)
