"""What a client can find out with its own data, for methods that ask before a round or in it, and for diagnostics that
ask after it (see :class:`fedstrata.methods.Probe`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.engines.batches import Batch
from fedstrata.engines.evaluation import score_models
from fedstrata.engines.forward import differentiable_attention
from fedstrata.engines.operations import Operations
from fedstrata.engines.training import Assignment, Trainer
from fedstrata.errors import FedStrataError
from fedstrata.losses import CrossEntropy, cross_entropy
from fedstrata.methods.contract.views import Clients, Phase
from fedstrata.rng import fold, numpy_generator, philox, uniform
from fedstrata.stack import Tensors, align, per_client, take
from fedstrata.transfer import to_device

_BYTES_AT_ONCE = 2**30
_SAMPLES_AT_ONCE = 256
_TWICE_AT_ONCE = 1024
"""Samples of several clients whose gradients are differentiated once more at once."""
_WITH_SECOND_DERIVATIVES: Operations = {F.scaled_dot_product_attention: differentiable_attention}


@dataclass(frozen=True)
class DataProbe:
    """Gives hooks the answers of a client's own data (see :class:`fedstrata.methods.Probe`)."""

    trainer: Trainer
    clients: Clients
    at_once: int | None = None
    """The most models that may run together; none: as many as there are clients."""

    def gradients(
        self, model: Tensors, batch_size: int, all_samples: bool = False, balanced: bool = False, draw: int = 0
    ) -> Tensors:
        """Return the gradients of the mean loss on a minibatch or all samples, in training mode; nothing is kept."""
        layers, data = self.trainer.setting.layers, self.trainer.data
        names = layers.parameter_names
        buffers = {name: model[name] for name in layers.buffer_names}
        total = {name: torch.zeros_like(model[name], memory_format=torch.contiguous_format) for name in names}
        dropout = self.clients.keys(f"probe/{draw}/dropout" if draw else "probe/dropout")
        drawn = (
            self._balanced(batch_size, draw)
            if balanced and not all_samples
            else self._plain(batch_size, None if all_samples else 1, draw)
        )
        for batch in drawn:
            rows = batch.rows
            keys = fold(dropout if rows is None else dropout[rows], batch.step)
            some = self.clients.rows(rows, batch.members)
            inputs, labels = data.make(batch.positions, None, clients=batch.numbers)
            taken = take({name: model[name] for name in names}, rows)
            own = {name: tensor.detach().requires_grad_() for name, tensor in taken.items()}
            step = torch.full((), batch.step, device=data.device)
            effective = self.trainer.setting.method.effective(some, own, step)
            outputs, _ = self.trainer.forward(effective, take(buffers, rows), inputs, keys, training=True)
            loss = self.trainer.setting.loss(outputs, labels, some.label_counts).sum()
            for name, gradient in zip(names, torch.autograd.grad(loss, [own[name] for name in names]), strict=True):
                if all_samples:
                    gradient = gradient * align(self._part(batch), gradient).to(gradient.dtype)
                if rows is None:
                    total[name] += gradient
                else:
                    total[name].index_add_(0, rows, gradient)
        return total

    def _part(self, batch: Batch) -> Tensor:
        """Tell which part of its clients' samples a batch holds."""
        sizes = self.clients.sizes if batch.rows is None else self.clients.sizes[batch.rows]
        return batch.positions.shape[1] / sizes.to(torch.float64)

    def fisher(
        self, model: Tensors, names: Sequence[str], batch_size: int, batches: int, kind: str, draw: int = 0
    ) -> Tensors:
        """Estimate the diagonal Fisher information of some parameters on minibatches, in evaluation mode."""
        total = {name: torch.zeros_like(model[name], memory_format=torch.contiguous_format) for name in names}
        at_once = max(1, _BYTES_AT_ONCE // sum(model[name][0].nbytes for name in names))
        keys = self.clients.keys(_purpose("probe/labels", draw))
        everybody = torch.arange(len(self.clients.ids), device=keys.device)
        for batch in self._plain(batch_size, batches, draw):
            owners, positions = everybody if batch.rows is None else batch.rows, batch.positions
            draws = uniform(fold(keys[owners], batch.step), positions.shape[1:])
            weight = 1 / batches
            if kind != "batch":  # every sample is a client of its own, with a batch of one
                weight /= positions.shape[1]
                owners = owners.repeat_interleave(positions.shape[1])
                positions, draws = positions.reshape(-1, 1), draws.reshape(-1, 1)
            for rows in torch.split(torch.arange(len(owners), device=keys.device), at_once):
                own = take(model, owners[rows])
                numbers = self.clients.numbers[owners[rows]]
                squares = self._squared_gradients(own, names, positions[rows], kind, draws[rows], numbers)
                for name in names:
                    total[name].index_add_(0, owners[rows], squares[name] * weight)
        return total

    def _squared_gradients(
        self, model: Tensors, names: Sequence[str], positions: Tensor, kind: str, draws: Tensor, numbers: Tensor
    ) -> Tensors:
        layers = self.trainer.setting.layers
        inputs, labels = self.trainer.data.make(positions, None, clients=numbers)
        parameters = {name: model[name].detach() for name in layers.parameter_names}
        for name in names:
            parameters[name].requires_grad_()
        buffers = {name: model[name] for name in layers.buffer_names}
        none = torch.zeros(len(positions), 2, dtype=torch.int64, device=positions.device)
        outputs, _ = self.trainer.forward(parameters, buffers, inputs, none, training=False)
        if kind.startswith("sampled"):
            chances = outputs.detach().softmax(-1).cumsum(-1)
            labels = (draws[..., None] > chances).sum(-1).clamp(max=outputs.shape[-1] - 1)
        if kind == "sampled-logit":
            slopes_of = outputs.gather(-1, labels[..., None]).squeeze(-1)
        else:
            slopes_of = cross_entropy(outputs, labels)
        gradients = torch.autograd.grad(slopes_of.mean(1).sum(), [parameters[name] for name in names])
        return {name: gradient.square() for name, gradient in zip(names, gradients, strict=True)}

    def features(self, model: Tensors) -> Tensor:
        """Return the mean features of each class ``[K, classes, features]``, over all samples, in evaluation mode."""
        layers, data = self.trainer.setting.layers, self.trainer.data
        parameters = {name: model[name] for name in layers.parameter_names}
        buffers = {name: model[name] for name in layers.buffer_names}
        counts = self.clients.label_counts
        total: Tensor | None = None
        with torch.no_grad():
            for batch in self._plain(_SAMPLES_AT_ONCE, None):
                rows = torch.arange(len(counts), device=counts.device) if batch.rows is None else batch.rows
                inputs, labels = data.make(batch.positions, None, clients=batch.numbers)
                none = torch.zeros(len(rows), 2, dtype=torch.int64, device=rows.device)
                _, features, _ = self.trainer.forward.features(
                    take(parameters, batch.rows), take(buffers, batch.rows), inputs, none, training=False
                )
                flat = features.flatten(2)
                total = flat.new_zeros(*counts.shape, flat.shape[2]) if total is None else total
                belongs = F.one_hot(labels, counts.shape[1]).to(flat.dtype)
                total.index_add_(0, rows, belongs.transpose(1, 2) @ flat)
        assert total is not None
        return total / counts.clamp(min=1)[..., None].to(total.dtype)

    def gradient_spread(self, model: Tensors, names: Sequence[str], batch_size: int, draw: int = 0) -> Tensors:
        """Return the variance over single samples of each parameter's gradient, summed over its entries ``[K]``."""
        clients, device = len(self.clients.ids), self.clients.sizes.device
        at_once = max(1, _BYTES_AT_ONCE // sum(model[name][0].nbytes for name in names))
        squares = {name: torch.zeros(clients, dtype=torch.float64, device=device) for name in names}
        sums = {name: torch.zeros_like(model[name], dtype=torch.float64) for name in names}
        everybody = torch.arange(clients, device=device)
        counts = torch.zeros(clients, dtype=torch.float64, device=device)
        for batch in self._plain(batch_size, 1, draw):
            owners = everybody if batch.rows is None else batch.rows
            counts[owners] = float(batch.positions.shape[1])
            owners, positions = owners.repeat_interleave(batch.positions.shape[1]), batch.positions.reshape(-1, 1)
            for rows in torch.split(torch.arange(len(owners), device=device), at_once):
                some = owners[rows]
                gradients = self._sample_gradients(take(model, some), names, positions[rows], some)
                for name, gradient in gradients.items():
                    precise = gradient.to(torch.float64)
                    squares[name].index_add_(0, some, per_client(precise.square()).sum(1))
                    sums[name].index_add_(0, some, precise)
        return {
            name: (squares[name] / counts - per_client(sums[name]).square().sum(1) / counts.square()).clamp(min=0)
            for name in names
        }

    def _sample_gradients(self, model: Tensors, names: Sequence[str], positions: Tensor, owners: Tensor) -> Tensors:
        """Take the gradients of the loss of single samples, each a client of its own with a batch of one."""
        setting, some = self.trainer.setting, self.clients.rows(owners)
        inputs, labels = self.trainer.data.make(positions, None, clients=self.clients.numbers[owners])
        parameters = {name: model[name].detach() for name in setting.layers.parameter_names}
        for name in names:
            parameters[name].requires_grad_()
        buffers = {name: model[name] for name in setting.layers.buffer_names}
        none = torch.zeros(len(positions), 2, dtype=torch.int64, device=positions.device)
        effective = setting.method.effective(some, parameters, None)
        outputs, _ = self.trainer.forward(effective, buffers, inputs, none, training=False)
        loss = setting.loss(outputs, labels, some.label_counts).sum()
        return dict(zip(names, torch.autograd.grad(loss, [parameters[name] for name in names]), strict=True))

    def curvature(
        self, model: Tensors, blocks: Mapping[str, Sequence[str]], batch_size: int, probes: int, draw: int = 0
    ) -> Tensors:
        """Return Hutchinson's estimates of the trace of each block of the Hessian ``[K, probes]``."""
        clients, device = len(self.clients.ids), self.clients.sizes.device
        found = {block: torch.zeros(clients, probes, dtype=torch.float64, device=device) for block in blocks}
        signs, dropout = (self.clients.keys(_purpose(f"probe/{use}", draw)) for use in ("signs", "dropout"))
        everybody, tried = torch.arange(clients, device=device), False
        for batch in self._plain(batch_size, 1, draw):
            all_rows = everybody if batch.rows is None else batch.rows
            for places in torch.split(everybody[: len(all_rows)], max(1, _TWICE_AT_ONCE // batch.positions.shape[1])):
                rows = all_rows[places]
                own = take(model, rows)
                weights = {name: own[name].detach().requires_grad_() for names in blocks.values() for name in names}
                keys = fold(dropout[rows], batch.step)
                slopes = self._slopes(own | weights, weights, rows, batch.positions[places], keys)
                if not tried:
                    tried = True
                    _refuse_once_only(slopes, weights)
                for probe in range(probes):
                    drawn = _signs(fold(signs[rows], probe), weights)
                    for block, names in blocks.items():
                        products = _products(slopes, drawn, {name: weights[name] for name in names})
                        for name, product in products.items():
                            found[block][rows, probe] += per_client(product.to(torch.float64) * drawn[name]).sum(1)
        return found

    def _slopes(self, model: Tensors, weights: Tensors, rows: Tensor, positions: Tensor, keys: Tensor) -> Tensors:
        """Take gradients of the loss in training mode that can be differentiated once more."""
        setting, some = self.trainer.setting, self.clients.rows(rows)
        inputs, labels = self.trainer.data.make(positions, None, clients=self.clients.numbers[rows])
        parameters = {name: model[name] for name in setting.layers.parameter_names}
        buffers = {name: model[name] for name in setting.layers.buffer_names}
        step = torch.zeros((), dtype=torch.int64, device=positions.device)
        effective = setting.method.effective(some, parameters, step)
        outputs, _ = self.trainer.forward.twice_differentiable()(
            effective, buffers, inputs, keys, training=True, around=_WITH_SECOND_DERIVATIVES
        )
        loss = setting.loss(outputs, labels, some.label_counts).sum()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        return dict(zip(weights, gradients, strict=True))

    def representations(self, model: Tensors, layers: Sequence[str], samples: int, draw: int = 0) -> Tensors:
        """Return centred Gram matrices of what layers make of common samples ``[K, n, n]``, by layer, in float64."""
        setting, data = self.trainer.setting, self.trainer.data
        positions, owners = self._common(samples, draw)
        inputs = data.make(positions[:, None], None, clients=owners)[0].transpose(0, 1)
        count = len(next(iter(model.values())))
        at_once = min(self.at_once or count, max(1, _TWICE_AT_ONCE // len(positions)))
        found: dict[str, list[Tensor]] = {name: [] for name in layers}
        with torch.no_grad():
            for rows in torch.split(torch.arange(count, device=data.device), at_once):
                own = take(model, rows)
                some = self.clients.rows(rows)
                parameters = {name: own[name] for name in setting.layers.parameter_names}
                buffers = {name: own[name] for name in setting.layers.buffer_names}
                effective = setting.method.effective(some, parameters, None)
                none = torch.zeros(len(rows), 2, dtype=torch.int64, device=data.device)
                seen = inputs.expand(len(rows), *inputs.shape[1:])
                for name, given in self.trainer.forward.activations(layers, effective, buffers, seen, none).items():
                    flat = given.flatten(2).to(torch.float64)
                    flat = flat - flat.mean(1, keepdim=True)
                    found[name].append(flat @ flat.transpose(1, 2))
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _common(self, samples: int, draw: int) -> tuple[Tensor, Tensor]:
        """Choose training samples of the clients in turn, and tell whose they are ``[n]``."""
        purpose, orders = _purpose("probe/common", draw), []
        for client in self.clients.ids:
            chance = numpy_generator(self.clients.seed, self.clients.round, client, purpose)
            orders.append(chance.permutation(self.trainer.data.split.train[client])[:samples])
        turns = np.concatenate([np.arange(len(order)) for order in orders])
        chosen = np.argsort(turns, kind="stable")[:samples]
        numbers = np.repeat(np.array(self.clients.ids), [len(order) for order in orders])
        device = self.trainer.setting.device
        return to_device(np.concatenate(orders)[chosen], device), to_device(numbers[chosen], device)

    def train(
        self,
        model: Tensors,
        epochs: int,
        span: tuple[float, float] = (0.0, 1.0),
        memory: Tensors | None = None,
    ) -> Tensors:
        """Return the model after a stretch of some epochs of local training at the initial learning rate."""
        clients = replace(self.clients, memory=self.clients.memory | (memory or {}))
        task = Assignment(clients, model, model, Phase(epochs=epochs, span=span), "survey")
        return self.trainer.train(task).model

    def test(self, model: Tensors, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return accuracy and mean cross entropy, ``[K]`` each, on all training samples or all that are held out.

        By definition: what a method concludes from it does not depend on the loss that tests tell.
        """
        data, setting = self.trainer.data, replace(self.trainer.setting, test_loss=CrossEntropy())
        samples = data.held_out if held_out else data.split.train
        return score_models(setting, data, self.trainer.forward, model, samples, self.clients.ids)

    def _plain(self, batch_size: int, batches: int | None, draw: int = 0) -> Iterator[Batch]:
        """Yield minibatches of each client; ``None``: as many as hold all its samples once."""
        setting = self.trainer.setting
        work = replace(setting.work, batch_size=batch_size, epochs=1, steps=batches)
        if batches is None:
            work = replace(work, last_batch="keep", samples=None)
        return self.trainer.data.batches(
            self.clients.ids, work, setting.seed, self.clients.round, _purpose("probe", draw)
        )

    def _balanced(self, batch_size: int, draw: int) -> Iterator[Batch]:
        """Yield each client's batch with its classes in turn, one client at a time; small clients repeat samples."""
        for row, client in enumerate(self.clients.ids):
            chance = numpy_generator(self.clients.seed, self.clients.round, client, _purpose("probe/balanced", draw))
            positions = chance.permutation(self.trainer.data.split.train[client])
            order = np.argsort(_occurrence(self.trainer.data.dataset.labels.numpy()[positions]), kind="stable")
            device = self.trainer.setting.device
            needed = to_device(np.resize(positions[order], (1, batch_size)), device)
            rows, numbers = torch.arange(row, row + 1, device=device), torch.arange(client, client + 1, device=device)
            yield Batch(rows, needed, 0, numbers, np.array([row]))


def _signs(keys: Tensor, weights: Tensors) -> Tensors:
    """Draw -1 or 1 for every entry of the weights of K clients, whose keys are given ``[K, 2]``."""
    return {
        name: ((philox(keys, tensor[0].numel(), place)[:, : tensor[0].numel()] & 1) * 2 - 1)
        .reshape(tensor.shape)
        .to(tensor.dtype)
        for place, (name, tensor) in enumerate(weights.items())
    }


def _products(slopes: Tensors, vector: Tensors, weights: Tensors) -> Tensors:
    """Multiply the Hessian of each client's loss by some weights by a vector.

    ``slopes`` are the gradients of the loss, open to autograd.
    """
    if not weights:
        return {}
    along = torch.stack([(slopes[name] * vector[name]).sum() for name in weights]).sum()
    if not along.requires_grad:  # a loss that is linear in its weights
        return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    products = torch.autograd.grad(
        along, list(weights.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(weights, products, strict=True))


def _refuse_once_only(slopes: Tensors, weights: Tensors) -> None:
    """Refuse gradients that cannot be differentiated once more.

    A pass back to the weights alone would leave out, without a word, what an operation forbids to differentiate; one
    back to everything does not.
    """
    total = torch.stack([slope.sum() for slope in slopes.values()]).sum()
    if not total.requires_grad:
        return
    try:
        total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError) as error:
        raise FedStrataError(
            f"An operation of the model has no second derivative ({str(error).splitlines()[0][:160]}), so its Hessian "
            "cannot be measured; leave 'hessian' out, or use another operation."
        ) from error
    for weight in weights.values():
        weight.grad = None


def _purpose(what: str, draw: int) -> str:
    """Name the draws of a probe, others for each ``draw``."""
    return f"{what}/{draw}" if draw else what


def _occurrence(labels: np.ndarray) -> np.ndarray:
    """Number the occurrences of each label: 0 for its first, 1 for its second, ...

    >>> _occurrence(np.array([3, 3, 1, 3, 1])).tolist()
    [0, 1, 0, 2, 1]
    """
    order = np.argsort(labels, kind="stable")
    grouped = labels[order]
    first = np.searchsorted(grouped, grouped)
    numbers = np.empty_like(order)
    numbers[order] = np.arange(len(labels)) - first
    return numbers
