"""Train the small vision transformer centrally, and save it as the start of federated fine-tuning.

    python examples/pretrain_vit.py --data cifar10 --out vit.safetensors
    fedstrata run --data cifar100 --model 'vit(weights=vit.safetensors)' --clients 100 --partition classes:10

Central training is a federation of one client: a round is an epoch, and averaging changes nothing. The head for the
classes of this data is saved too; a model for another number of classes starts with a fresh one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import fedstrata
from fedstrata.callbacks import RoundView
from fedstrata.files import make_folder, write_atomically
from fedstrata.models import models
from fedstrata.models.vit import ViTSpec
from fedstrata.runs.devices import choose_device
from fedstrata.schedules import Cosine, schedules

import safetensors.torch  # isort: skip - torch is imported after fedstrata has prepared the environment


@schedules.register("warm-up-cosine")
@dataclass(frozen=True)
class WarmUpCosine(Cosine):
    """Rise to the full learning rate in equal steps over the first rounds, then fall along half a cosine."""

    warm_up: int = fedstrata.parameter(5, "The rounds before the full rate.", low=0)

    def factor(self, round: int, rounds: int, losses: Sequence[float] = ()) -> float:
        """Return the factor in a round, counted from 1."""
        if round <= self.warm_up:
            return round / (self.warm_up + 1)
        return super().factor(round - self.warm_up, rounds - self.warm_up, losses)


def main() -> None:
    """Read the command line, train, print every epoch, and save the model."""
    options = read_options()
    device, model = choose_device(options.device), models.make(options.model)
    if not isinstance(model, ViTSpec):
        raise fedstrata.FedStrataError(f"'{model}' cannot start from a file of weights; give a 'vit(...)'.")
    make_folder(options.out.parent)
    experiment = fedstrata.Experiment(
        data=options.data,
        clients=1,
        partition="iid",
        model=str(model),
        method="fedavg",
        rounds=options.epochs,
        epochs=1,
        batch_size=options.batch_size,
        optimiser=f"adamw(learning_rate={options.learning_rate}, weight_decay=0.05, clip=1.0, keep=true)",
        schedule=f"warm-up-cosine(floor=0.01, warm_up={min(5, options.epochs // 4)})",
        transforms=options.transforms,
        seed=options.seed,
        engine="loop",
        device=str(device),
        precision="bf16" if device.type == "cuda" else "fp32",
    )
    result = fedstrata.run(experiment, callbacks=[print_epoch])
    facts = {"experiment": experiment.to_mapping(), "accuracy": result.summary["final"]["global.accuracy"]}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in result.model.items()}
    metadata = {"fedstrata": fedstrata.__version__, "pretraining": json.dumps(facts)}
    write_atomically(options.out, safetensors.torch.save(tensors, metadata))
    print(f'Saved; go on with --model "{replace(model, weights=str(options.out))}"')


def print_epoch(update: RoundView) -> None:
    """Print how far training has come."""
    accuracy, loss = update.metrics["global.accuracy"], update.metrics["train.loss"]
    print(
        f"epoch {update.round:>3} of {update.rounds}: training loss {loss:.4f}, test accuracy {accuracy:.2%}, "
        f"{update.seconds:.1f} s",
        flush=True,
    )


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="cifar10", help="the dataset (default: cifar10), found by FEDSTRATA_DATA")
    parser.add_argument("--model", default="vit", help="the model, such as vit(depth=4)")
    parser.add_argument("--transforms", default="flip+crop+normalise", help="what is done to the images")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--device", default="auto", help="cpu, cuda, or cuda if there is one (default)")
    parser.add_argument("--out", type=Path, default=Path("vit.safetensors"), help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except fedstrata.FedStrataError as error:
        raise SystemExit(f"Error: {error}") from None
