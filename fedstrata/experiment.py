"""An experiment: everything that decides the numbers of a run, as flat, plain data."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.spec import Spec, parameter

_PINNED = re.compile(r"([^/\\\0]+)@sha256:([0-9a-f]{64})")


def read_pinned(text: str) -> tuple[str, str] | None:
    """Read how an experiment names a file whose content is known, as its name and SHA-256; none for a mere path."""
    matched = _PINNED.fullmatch(text)
    return None if matched is None else (matched.group(1), matched.group(2))


@dataclass(frozen=True)
class Experiment(Spec):
    """One run, fully described. Texts such as ``fedprox(mu=0.01)`` are read by the registry of their kind."""

    name: ClassVar[str] = "experiment"
    stands_for: ClassVar[str] = "experiment"

    data: str = parameter("digits", "The dataset; 'fedstrata datasets' lists them.")
    data_root: str | None = parameter(None, "Where the dataset's files lie, if not in FEDSTRATA_DATA or the cache.")
    clients: int | None = parameter(
        None, "How many clients hold the data; none: as many as it has sites, else 20.", low=1
    )
    partition: str | None = parameter(
        None,
        "How the data is divided, see 'fedstrata partitions'; none: by its sites ('natural') where it has them, else "
        "'dirichlet:0.1'.",
    )
    validation: int | None = parameter(
        None,
        "Training samples that nobody gets: the model of the round that is best on them is kept; none: the last one.",
        low=1,
    )
    validation_fraction: float | None = parameter(
        None,
        "The fraction of each client's training samples that it only judges models on: the best model is kept, each "
        "client's own where they have some; none: the last one.",
        above=0,
        below=1,
    )
    patience: int | None = parameter(
        None,
        "How many evaluations in a row may bring nothing better on the validation samples before the run ends; none: "
        "any number.",
        low=1,
    )
    model: str = parameter("cnn", "The model; 'fedstrata models' lists them.")
    method: str = parameter("fedavg", "The method, or several joined by '+'; 'fedstrata methods' lists them.")
    rounds: int = parameter(30, "How many rounds of communication.", low=1)
    participation: float = parameter(1.0, "The fraction of the clients that take part in a round.", above=0, high=1)
    late_clients: int = parameter(0, "How many clients, the last ones, take no part before they join.", low=0)
    join_round: int | None = parameter(None, "The round in which late clients join.", low=2)
    epochs: int = parameter(5, "Local epochs per round.", low=1)
    steps: int | None = parameter(None, "Local steps per round, instead of epochs.", low=1)
    batch_size: int = parameter(32, "Samples per local step.", low=1)
    last_batch: str = parameter(
        "keep",
        "What becomes of a smaller last batch of an epoch; a client's only batch is always kept.",
        choices=("keep", "drop"),
    )
    optimiser: str = parameter("sgd(learning_rate=0.1, momentum=0.9)", "The local optimiser: sgd, adam or adamw.")
    schedule: str = parameter("constant", "How the learning rate changes from round to round.")
    loss: str = parameter(
        "cross-entropy",
        "The loss that clients minimise, such as 'focal' or 'focal(weights=balanced)'.",
    )
    test_loss: str = parameter(
        "cross-entropy",
        "The loss that tests tell; runs that tell the same one can be compared, whatever they minimise.",
    )
    transforms: str = parameter(
        "normalise", "What is done to inputs, in order, such as 'flip+crop:4+normalise'; 'none' for nothing."
    )
    statistics: str = parameter(
        "averaged",
        "Running statistics of norm layers that the method shares: averaged, or kept local.",
        choices=("averaged", "local"),
    )
    upload_values: str = parameter(
        "as-is",
        "How weights travel from the clients: as they are, or in a narrower type, with its error in the metrics.",
        choices=("as-is", "fp16", "bf16", "int8"),
    )
    download_values: str = parameter(
        "as-is", "How weights travel to the clients.", choices=("as-is", "fp16", "bf16", "int8")
    )
    seed: int = parameter(0, "The seed of every draw.", low=0)
    engine: str = parameter(
        "auto",
        "How clients are trained: one by one, all at once, or what is faster here.",
        choices=("auto", "loop", "stacked"),
    )
    device: str = parameter("auto", "Where: cpu, cuda, or cuda if there is one.")
    precision: str = parameter("fp32", "The arithmetic of training.", choices=("fp32", "tf32", "bf16", "fp64"))
    chunk: int | None = parameter(
        None, "How many clients are trained at once, if not as many as fit the memory.", low=1
    )
    deterministic: bool = parameter(False, "On a GPU: only operations whose results repeat bit for bit.")
    replay: bool = parameter(
        True,
        "Record training steps and replay them: the same numbers, faster; hooks run in Python at the first steps only.",
    )
    evaluate_every: int = parameter(
        1, "The rounds from one evaluation to the next; the last round is always evaluated.", low=1
    )
    evaluate_trained: bool = parameter(
        True,
        "Whether evaluations also test the models that clients have just trained, before aggregation.",
    )
    metrics: str | None = parameter(
        None,
        "What models are judged by beside accuracy and loss, such as 'f1+auc+recall:each'; none: nothing.",
    )
    diagnose: str | None = parameter(
        None,
        "What is measured of the layers beside what every run measures, such as 'inertia+norms', or 'all'; "
        "'fedstrata diagnostics' lists them; none: nothing.",
    )
    reference_round: int = parameter(2, "The round against which the layers' inertia (cosine) is measured.", low=1)
    checkpoint_every: int | None = parameter(
        None,
        "The rounds from one checkpoint to the next; none: 10, or more where saving would take over a twentieth of the "
        "time.",
        low=1,
    )

    imports: tuple[str, ...] = parameter(
        (), "A Python file that registers components of your own, such as methods; may be repeated."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given: object = self.imports
        listed = (given,) if isinstance(given, str | Path) else given
        if not isinstance(listed, Sequence) or not all(isinstance(one, str | Path) for one in listed):
            raise FedStrataError(f"'{given}' does not fit the key 'imports': it takes a list of Python files.")
        object.__setattr__(self, "imports", tuple(str(one) for one in listed))

    @classmethod
    def from_mapping(cls, values: dict[str, Any], source: str = "the experiment") -> Experiment:
        """Build an experiment from keys and values, refusing keys that do not exist."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key in ("learning_rate", "lr"):
                raise FedStrataError(
                    f"The learning rate is no key of an experiment but a parameter of its optimiser, in {source} too: "
                    f"optimiser = 'sgd(learning_rate={values[key]})'; --learning-rate changes it alone, and so does "
                    "learning_rate=... of fedstrata.run."
                )
            if key not in known:
                raise unknown_name(f"key in {source} called", key, known)
        return cls(**values)

    @classmethod
    def read(cls, path: Path, overrides: dict[str, Any] | None = None) -> Experiment:
        """Read a TOML file; ``overrides`` replace what it says. Files to import are looked for from its folder on."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FedStrataError(f"There is no file '{path}'.") from None
        except OSError as error:
            raise FedStrataError(f"'{path}' cannot be read: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FedStrataError(f"'{path}' is not a TOML file: {error}.") from None
        experiment = cls.from_mapping(values, source=f"'{path}'")
        from_here = [text if read_pinned(text) else str(path.parent / text) for text in experiment.imports]
        return experiment.with_changes({"imports": from_here, **(overrides or {})})

    def with_changes(self, changes: dict[str, Any]) -> Experiment:
        """Return a copy with some keys changed."""
        return self.from_mapping({**self.to_mapping(), **changes})

    def to_mapping(self) -> dict[str, Any]:
        """Return all keys that are neither none nor empty."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value not in (None, ())}

    def to_toml(self) -> str:
        """Write the experiment as TOML; :meth:`read` gives it back."""
        return "".join(f"{key} = {_toml_value(value)}\n" for key, value in self.to_mapping().items())

    def __str__(self) -> str:
        """Show the experiment as its TOML text."""
        return self.to_toml()

    def __repr__(self) -> str:
        """Show what differs from the defaults."""
        changed = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        return f"Experiment({', '.join(f'{key}={value!r}' for key, value in changed.items())})"


def _toml_value(value: str | int | float | bool | tuple[str, ...]) -> str:
    """Write a value for TOML: JSON's notation, but for the delete character, which TOML wants escaped too."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise FedStrataError(f"{value!a} is not Unicode text and cannot stand in an experiment; rename it.") from None
    return text
