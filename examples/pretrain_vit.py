"""Train the small vision transformer centrally, and save it as the start of federated fine-tuning.

    python examples/pretrain_vit.py --data cifar10 --out vit.safetensors
    fedstrata run --data cifar100 --model 'vit(weights=vit.safetensors)' --clients 100 --partition classes:10

With the defaults this is the recipe of small vision transformers that see few images: RandAugment, mixup and CutMix,
smoothed labels, AdamW with a cosine after a warm-up. It takes minutes on a GPU, where the images stay and are changed,
and too long without one. The head for the classes of this data is saved too; a model for another number of classes
starts with a fresh one. Beside the weights a JSON file keeps the recipe, the accuracy of every epoch and the SHA-256.

mixup: "mixup: Beyond Empirical Risk Minimization" (Zhang et al., ICLR 2018). CutMix: "CutMix: Regularization Strategy
to Train Strong Classifiers with Localizable Features" (Yun et al., ICCV 2019).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import fedstrata
from fedstrata import rng
from fedstrata.data import Dataset, datasets
from fedstrata.data.transforms import Transform, apply_transforms, parse_transforms
from fedstrata.files import make_folder, write_atomically
from fedstrata.models import build_model, models
from fedstrata.models.vit import ViTSpec
from fedstrata.runs.devices import choose_device

import numpy as np  # isort: skip - fedstrata has prepared the environment before these are imported
import safetensors.torch  # isort: skip
import torch  # isort: skip
import torch.nn.functional as F  # isort: skip
from torch import Tensor, nn  # isort: skip

_AT_ONCE = 16384
"""How many images are changed at once: the more, the less a GPU waits for the next launch."""
_MEASURED = 3
"""The epochs after which it is known how long one takes; before, the device warms up."""


def main() -> None:
    """Read the command line, train, print every epoch, and save the model."""
    options = read_options()
    device, model = choose_device(options.device), models.make(options.model)
    if not isinstance(model, ViTSpec):
        raise fedstrata.FedStrataError(f"'{model}' cannot start from a file of weights; give a 'vit(...)'.")
    make_folder(options.out.parent)
    dataset = datasets.make(options.data).load(None)
    images = Images(dataset, parse_transforms(options.transforms), device, options.seed)
    network = build_model(model, dataset.input_shape, dataset.classes, options.seed, device=device)
    accuracies = train(network, images, options)
    recipe = {name: value for name, value in vars(options).items() if name not in ("minutes", "out")}
    facts = {
        "recipe": {**recipe, "epochs": len(accuracies), "model": str(model), "device": device.type},
        "accuracy": accuracies[-1],
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    metadata = {"fedstrata": fedstrata.__version__, "pretraining": json.dumps(facts)}
    content = safetensors.torch.save(tensors, metadata)
    write_atomically(options.out, content)
    digest = sha256(content).hexdigest()
    versions = {"fedstrata": fedstrata.__version__, "torch": str(torch.__version__)}
    kept = {**facts, "accuracies": accuracies, "sha256": digest, "versions": versions}
    write_atomically(options.out.with_suffix(".json"), json.dumps(kept, indent=2) + "\n")
    print(f"SHA-256 {digest}")
    print(f'Saved; go on with --model "{replace(model, weights=str(options.out))}"')


class Images:
    """All images of a dataset on the device, in batches; what is drawn for them depends on the seed and the epoch."""

    def __init__(self, dataset: Dataset, transforms: tuple[Transform, ...], device: torch.device, seed: int) -> None:
        self.dataset, self.transforms, self.device, self.seed = dataset, transforms, device, seed
        self.train, self.test = (
            (dataset.inputs[chosen].to(device), dataset.labels[chosen].to(device))
            for chosen in (torch.from_numpy(dataset.train), torch.from_numpy(dataset.test))
        )

    def training_batches(self, epoch: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the training images once, shuffled and changed at random; what is left of a batch is dropped."""
        inputs, labels = self.train
        size = min(size, len(labels))
        order = rng.numpy_generator(self.seed, "pretraining", epoch, "order").permutation(len(labels))
        places = torch.from_numpy(order[: len(order) // size * size]).to(self.device)
        keys = torch.tensor([rng.key(self.seed, "pretraining", epoch, "transforms")], device=self.device)
        for part, chosen in enumerate(places.split(max(_AT_ONCE // size, 1) * size)):
            changed = apply_transforms(self.transforms, _scaled(inputs[chosen])[None], self.dataset, keys, part)[0]
            yield from zip(changed.split(size), labels[chosen].split(size), strict=True)

    def test_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the test images, which are only normalised."""
        for inputs, labels in zip(*(tensor.split(size) for tensor in self.test), strict=True):
            yield apply_transforms(self.transforms, _scaled(inputs)[None], self.dataset)[0], labels


def _scaled(inputs: Tensor) -> Tensor:
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs.float()


@dataclass(frozen=True)
class Mixing:
    """How the images of a batch are mixed with those of its reverse: all pixels, or a rectangle of them."""

    share: float
    rows: slice | None = None
    columns: slice | None = None

    @classmethod
    def draw(cls, generator: np.random.Generator, sides: tuple[int, int], mixup: float, cutmix: float) -> Mixing:
        """Draw one of the two ways, of those that are wanted, and how much stays: a share from Beta(a, a)."""
        wanted = [way for way, strength in (("mixup", mixup), ("cutmix", cutmix)) if strength > 0]
        if not wanted:
            return cls(1.0)
        cut = wanted[generator.integers(len(wanted))] == "cutmix"
        share = float(generator.beta(*([cutmix if cut else mixup] * 2)))
        if not cut:
            return cls(share)
        rows, columns = (_span(generator, side, math.sqrt(1 - share)) for side in sides)
        replaced = (rows.stop - rows.start) * (columns.stop - columns.start)
        return cls(1 - replaced / math.prod(sides), rows, columns)

    def apply(self, images: Tensor) -> Tensor:
        """Mix images ``[n, channels, height, width]``."""
        if self.share == 1:
            return images
        if self.rows is None:
            return self.share * images + (1 - self.share) * images.flip(0)
        mixed = images.clone()
        mixed[:, :, self.rows, self.columns] = images.flip(0)[:, :, self.rows, self.columns]
        return mixed

    def loss(self, outputs: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """Weigh the cross entropies with both labels of each image as its pixels are."""
        own = F.cross_entropy(outputs, labels, label_smoothing=smoothing)
        if self.share == 1:
            return own
        return self.share * own + (1 - self.share) * F.cross_entropy(outputs, labels.flip(0), label_smoothing=smoothing)


def _span(generator: np.random.Generator, side: int, part: float) -> slice:
    """Draw a part of a side about a middle that may lie anywhere; what reaches beyond the border is lost."""
    middle, half = int(generator.integers(side)), int(part * side) // 2
    return slice(max(middle - half, 0), min(middle + half, side))


def train(network: nn.Module, images: Images, options: argparse.Namespace) -> list[float]:
    """Train a network in place, and return the test accuracies of all epochs."""
    device = images.device
    torch.set_float32_matmul_precision("high")
    optimiser = make_optimiser(network, options.learning_rate, options.weight_decay, fused=device.type == "cuda")
    generator = rng.numpy_generator(options.seed, "pretraining", "mixing")
    torch.manual_seed(rng.torch_seed(options.seed, "pretraining", "dropout"))
    sides = images.dataset.input_shape[-2:]
    network = replayed(network, images, options.batch_size)
    epochs, accuracies, began = options.epochs, list[float](), time.perf_counter()
    for epoch in range(1, epochs + 1):
        if epoch > epochs:
            break
        start, total, steps = time.perf_counter(), torch.zeros((), device=device), 0
        network.train()
        count = len(images.train[1]) // min(options.batch_size, len(images.train[1]))
        for inputs, labels in images.training_batches(epoch, options.batch_size):
            rate = options.learning_rate * factor(epoch - 1 + (steps + 0.5) / count, epochs, options.warm_up)
            for group in optimiser.param_groups:
                group["lr"] = rate
            mixing = Mixing.draw(generator, sides, options.mixup, options.cutmix)
            with half_precision(device):
                outputs = network(mixing.apply(inputs))
            loss = mixing.loss(outputs.float(), labels, options.label_smoothing)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
            total += loss.detach()
            steps += 1
        accuracies.append(accuracy(network, images))
        print(
            f"epoch {epoch:>3} of {epochs}: training loss {float(total) / steps:.4f}, "
            f"test accuracy {accuracies[-1]:.2%}, {time.perf_counter() - start:.1f} s",
            flush=True,
        )
        if epoch == _MEASURED and options.minutes is not None:
            now = time.perf_counter()
            fitting = epoch + int((60 * options.minutes - (now - began)) / (now - start))
            # The rate has only risen so far: a run with that many epochs and this warm-up gives the same weights.
            fitting = max(fitting, 2 * options.warm_up)
            if fitting < epochs:
                epochs = fitting
                print(f"Because of --minutes {epochs} epochs are trained; the rate falls faster.", flush=True)
    return accuracies


def replayed(network: nn.Module, images: Images, batch_size: int) -> nn.Module:
    """On a GPU, record both passes over a batch once and replay them: launching a small model takes longer than it."""
    if images.device.type != "cuda":
        return network
    inputs, labels = images.train
    sample = torch.zeros(min(batch_size, len(labels)), *inputs.shape[1:], device=images.device)
    network.train()
    with half_precision(images.device):
        recorded: nn.Module = torch.cuda.make_graphed_callables(network, (sample,))  # type: ignore[no-untyped-call]
    return recorded


def make_optimiser(network: nn.Module, rate: float, weight_decay: float, fused: bool) -> torch.optim.Optimizer:
    """Make AdamW, which shrinks the weights of layers but no biases, norms, class token or positions."""
    shrunk = {id(module.weight) for module in network.modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    groups: list[dict[str, Any]] = [
        {"params": [one for one in network.parameters() if (id(one) in shrunk) == chosen], "weight_decay": decay}
        for chosen, decay in ((True, weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=rate, fused=fused)


def factor(done: float, epochs: int, warm_up: int) -> float:
    """Tell the factor on the learning rate after so many epochs: a line up to 1, then half a cosine down to 0."""
    if done < warm_up:
        return done / warm_up
    return (1 + math.cos(math.pi * (done - warm_up) / max(epochs - warm_up, 1))) / 2


def half_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Compute in bfloat16 on a GPU; nothing is remembered of weights, which change from replay to replay."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


@torch.no_grad()
def accuracy(network: nn.Module, images: Images) -> float:
    """Measure the part of the test images that a network gets right."""
    network.eval()
    right = torch.zeros((), dtype=torch.int64, device=images.device)
    for inputs, labels in images.test_batches(2048):
        with half_precision(images.device):
            right += (network(inputs).argmax(1) == labels).sum()
    return int(right) / len(images.test[1])


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="cifar10", help="the dataset (default: cifar10), found by FEDSTRATA_DATA")
    parser.add_argument("--model", default="vit", help="the model, such as vit(depth=4)")
    parser.add_argument(
        "--transforms", default="flip+crop+randaugment+normalise", help="what is done to the images in training"
    )
    parser.add_argument("--mixup", type=float, default=0.8, help="Beta's parameter (default: 0.8); 0: no mixup")
    parser.add_argument("--cutmix", type=float, default=1.0, help="Beta's parameter (default: 1); 0: no CutMix")
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--minutes", type=float, help="train fewer epochs where they would take longer")
    parser.add_argument(
        "--warm-up", type=int, help="the epochs before the full learning rate (default: 10, or a quarter of all)"
    )
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--device", default="auto", help="cpu, cuda, or cuda if there is one (default)")
    parser.add_argument("--out", type=Path, default=Path("vit.safetensors"), help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.warm_up is None:
        options.warm_up = min(10, options.epochs // 4)
    if not 0 <= options.warm_up < options.epochs or options.batch_size < 1:
        parser.error("there must be more epochs than those of the warm-up, and batches of at least one image.")
    if options.minutes is not None and options.warm_up < _MEASURED:
        parser.error(f"with --minutes the warm-up must take at least {_MEASURED} epochs, by which time is measured.")
    return options


if __name__ == "__main__":
    try:
        main()
    except fedstrata.FedStrataError as error:
        raise SystemExit(f"Error: {error}") from None
