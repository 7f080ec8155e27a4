"""What is called while a run goes on: after every round, after every evaluation, and at its end.

A callback is an object with any of the hooks of :class:`Callback`, or a function, which is called after every round. It
looks on: what it gets are copies, so that no number depends on it, but it may end the run by raising :class:`StopRun`.
In Python callbacks are given to :func:`fedstrata.run`; a file that is imported (``--import``) registers them::

    @callbacks.register("watch")
    class Watch(Callback):
        def on_round(self, view): ...

and from then on they are called in every run whose experiment names that file, also when it is resumed.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fedstrata.errors import FedStrataError, FedStrataWarning, nearest
from fedstrata.spec import Registry, is_registering
from fedstrata.stack import Tensors

if TYPE_CHECKING:
    from fedstrata.trained import TrainedModel


class StopRun(Exception):  # noqa: N818 - not an error
    """Raised by a callback to end its run after the current round.

    The run is then finished, with its results so far; its summary holds the reason under ``stopped``.
    """


class Models(Protocol):
    """Where a view takes models from when it is asked for them: the driver of the run."""

    def tested_model(self, round: int) -> Tensors:
        """Copy the shared part of the model that is tested after a round; refused once that round is over."""

    def ready_model(self, round: int, client: int | None) -> TrainedModel:
        """Make a model ready to use, the global one or a client's; refused once that round is over."""


@dataclass(frozen=True, repr=False)
class RoundView:
    """What a callback sees of a round: its number, its metrics and, when it asks for them, the models.

    ``metrics`` are those of the round table, such as ``train.loss`` and ``client_after.accuracy.mean``; accuracies are
    there in rounds that are ``evaluated``. ``layers`` are the numbers of the layers: ``layers["update"]["conv1"]``.
    Models are copied when they are touched, and cost nothing otherwise.
    """

    method: str
    seed: int
    round: int
    rounds: int
    seconds: float
    metrics: Mapping[str, float]
    evaluated: bool = False
    models: Models | None = field(default=None, repr=False, compare=False)
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))
        of_layers = {metric: MappingProxyType(dict(values)) for metric, values in self.layers.items()}
        object.__setattr__(self, "layers", MappingProxyType(of_layers))

    def __repr__(self) -> str:
        """Tell the round in a line."""
        loss = self.metrics.get("train.loss", math.nan)
        return f"RoundView({self.method}, seed {self.seed}, round {self.round} of {self.rounds}, train.loss {loss:.4g})"

    @property
    def model(self) -> Tensors:
        """The weights and buffers of the shared model as it is tested after this round, by name: a copy.

        It is empty where clients share nothing. It can be had while the callback is called, not later.
        """
        return self._models.tested_model(self.round)

    def global_model(self) -> TrainedModel:
        """Make the global model of this round, ready to use: raw inputs in, classes out."""
        return self._models.ready_model(self.round, None)

    def client_model(self, client: int) -> TrainedModel:
        """Make the model that a client would use after this round, ready to use."""
        return self._models.ready_model(self.round, client)

    @property
    def _models(self) -> Models:
        if self.models is None:
            raise FedStrataError("This view of a round comes without models.")
        return self.models


class Callback:
    """What can be called while a run goes on; derive from it, and define the hooks that you need."""

    only_numbers: ClassVar[bool] = False
    """Whether it looks at numbers alone, not at models, and never ends a run: then it may hear of a round when the next
    one is already under way, and a GPU need not wait for it.
    """

    def on_round(self, view: RoundView) -> None:
        """Look at a round that is done."""

    def on_evaluate(self, view: RoundView) -> None:
        """Look at a round in which models were tested, after :meth:`on_round`."""

    def on_end(self, view: RoundView, summary: Mapping[str, Any]) -> None:
        """Look at the last round and the summary of the run, which is saved already."""


HOOKS = {
    name: list(inspect.signature(hook).parameters)[1:]
    for name, hook in vars(Callback).items()
    if name.startswith("on_")
}
"""The hooks, with what they are given."""

_SQUEEZED = {name.replace("_", "") for name in HOOKS}

Listener = Callback | Callable[[RoundView], None]
"""A callback, or the shortest one: a function that is called after every round."""


class CallbackRegistry(Registry[Any]):
    """The callbacks that imported files bring; those of a file are called in the runs that import it."""

    def register(self, name: str) -> Callable[[type[Any]], type[Any]]:
        """Put the decorated class under ``name``."""
        if not is_registering():
            warnings.warn(
                f"The callback '{name}' is called in runs that import its file (--import, or imports=[...]); here, "
                "give an object of its class to callbacks=[...].",
                FedStrataWarning,
                stacklevel=2,
            )
        return super().register(name)


callbacks: Registry[Any] = CallbackRegistry("callback")


def as_callback(given: object) -> object:
    """Check that something can be called while a run goes on; a function becomes a callback of rounds."""
    if isinstance(given, type):
        raise FedStrataError(f"The callback {given.__name__} is a class; give an object of it: {given.__name__}().")
    refuse_misspelt(type(given))
    if any(callable(getattr(given, hook, None)) for hook in HOOKS):
        return given
    if callable(given):
        return _AfterEveryRound(given)
    raise FedStrataError(
        f"{given!r} is no callback: it has none of {', '.join(HOOKS)}, and is no function to call after every round."
    )


def refuse_misspelt(cls: type) -> None:
    """Refuse a class with a method that looks like a hook but is none, or a hook that cannot be called."""
    for name, value in inspect.getmembers(cls, inspect.isfunction):
        if name in HOOKS:
            try:
                inspect.signature(value).bind(None, *HOOKS[name])
            except TypeError:
                taken = ", ".join(inspect.signature(value).parameters)
                raise FedStrataError(
                    f"The hook '{name}' of {cls.__name__} takes ({taken}); it is called with "
                    f"({', '.join(['self', *HOOKS[name]])})."
                ) from None
        elif name.startswith("on_") or name.lower() in _SQUEEZED:
            meant = nearest(name, HOOKS)
            raise FedStrataError(
                f"{cls.__name__} defines '{name}', which is no hook of a callback, so that nobody would call it; "
                + (f"did you mean '{meant}'?" if meant else f"there are {', '.join(HOOKS)}.")
            )


class _AfterEveryRound(Callback):
    def __init__(self, function: Callable[[RoundView], None]) -> None:
        self.on_round = function  # type: ignore[method-assign,assignment]


class Callbacks:
    """All that is called while one run goes on."""

    def __init__(self, given: Iterable[object] = ()) -> None:
        if not isinstance(given, Iterable):
            raise FedStrataError(f"callbacks takes a list: callbacks=[{type(given).__name__}(...)].")
        self._all = [as_callback(one) for one in given]

    def __iter__(self) -> Iterator[object]:
        return iter(self._all)

    @property
    def only_numbers(self) -> bool:
        """Whether all of them look at numbers alone."""
        return all(getattr(one, "only_numbers", False) for one in self._all)

    def after_round(self, view: RoundView) -> StopRun | None:
        """Show everybody a round; return who wants the run to end with it, the first of several."""
        asked = [self._call("on_round", view)]
        if view.evaluated:
            asked.append(self._call("on_evaluate", view))
        return next((stop for stop in asked if stop is not None), None)

    def at_end(self, view: RoundView, summary: Mapping[str, Any]) -> None:
        """Show everybody the end."""
        self._call("on_end", view, MappingProxyType(copy.deepcopy(dict(summary))))

    def _call(self, hook: str, view: RoundView, *more: Any) -> StopRun | None:
        asked = None
        for callback in self._all:
            call = getattr(callback, hook, _nothing)
            try:
                if callbacks.holds(type(callback)):
                    _call_imported(call, f"'{type(callback).name}' failed in {hook}", view, *more)  # type: ignore[attr-defined]
                else:
                    call(view, *more)
            except StopRun as stop:
                asked = asked or stop
        return asked


def _call_imported(call: Callable[..., None], where: str, view: RoundView, *more: Any) -> None:
    """Call what a command has imported: what it prints is no result of the command, and an error is a sentence."""
    try:
        with redirect_stdout(sys.stderr):
            call(view, *more)
    except (StopRun, FedStrataError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise FedStrataError(f"The callback {where} of round {view.round}: {what}") from error


def _nothing(*given: Any) -> None:
    return None
