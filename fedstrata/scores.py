"""Numbers by which a classifier is judged, from its probabilities and the true labels; NumPy alone.

A metric is a component like the others: registered under a name, with checked parameters, written as text. Several are
joined by ``+``, as in ``f1+auc+recall(of=each)``. :func:`score` turns them into named numbers.

What the labels at hand do not define is NaN and never 0: a client without samples of a class has no recall of it.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedstrata.errors import FedStrataError, first_line
from fedstrata.spec import Call, Registry, Spec, parameter, parse

metrics: Registry[Metric] = Registry("metric")
ALWAYS = ("accuracy", "loss")
"""What every evaluation of a run measures, asked for or not."""
MEAN, EACH = "mean", "each"
_PYTHON = "python"
"""How an experiment marks a metric that is a function of a Python program: ``python:its_name``."""

Function = Callable[[np.ndarray, np.ndarray], float]
"""A metric of one's own: from probabilities ``[n, classes]`` and labels ``[n]``, both NumPy arrays, to a number."""


@dataclass(frozen=True)
class Metric(Spec, ABC):
    """A way of judging probabilities ``[n, classes]`` by labels ``[n]``, at least one.

    The result is a number, an array with one number per class, or one with the classes as rows and columns.
    """

    higher_is_better: ClassVar[bool | None] = True
    defined_for: ClassVar[str] = ""
    """Which test samples define it, in words, where not all do."""

    @abstractmethod
    def compute(self, probabilities: np.ndarray, labels: np.ndarray) -> float | np.ndarray:
        """Compute it; NaN where these labels do not define it."""

    @property
    def axes(self) -> int:
        """How many axes the result has: none for a number, one for a number of each class, two for a matrix."""
        return 0

    @property
    def tells_of_classes(self) -> bool:
        """Whether it tells something of single classes, and so of few samples."""
        return self.axes > 0


# From text and Python to metrics --------------------------------------------------------------------------------------


def make_metrics(given: object) -> tuple[Metric, ...]:
    """Read metrics: a text such as ``f1+auc``, a function of one's own, a metric, or a list of these.

    >>> [str(one) for one in make_metrics(["f1+auc", "recall:each"])]
    ['f1', 'auc', 'recall(of=each)']
    """
    if isinstance(given, str):
        found = [_named(call) for call in parse(given, metrics.kind)]
    elif isinstance(given, Metric):
        found = [given]
    elif callable(given) and not isinstance(given, type):
        found = [_of_function(given)]
    elif isinstance(given, Iterable):
        found = [one for some in given for one in make_metrics(some)]
    else:
        raise FedStrataError(
            f"{given!r} is no metric; give a text such as 'f1+auc', a function of probabilities and labels, or a list."
        )
    by_name: dict[str, Metric] = {}
    for one in found:
        if by_name.setdefault(str(one), one) != one:
            raise FedStrataError(f"Two different metrics are called '{one}'; rename your function.")
    return tuple(by_name.values())


def _of_function(function: Function) -> Metric:
    made = function_metric(function)
    there = metrics.registered(made.name)
    if there is None:
        return made()
    if getattr(there, "function", None) is function:
        return there()
    raise FedStrataError(f"There is already a metric '{made.name}'; rename your function.")


def _named(call: Call) -> Metric:
    if call.name == _PYTHON:
        name = call.positional[0] if call.positional else ""
        raise FedStrataError(
            f"The metric '{name}' is a function of a Python program; give it from there with metrics=[{name}], or "
            "register it in a file (fedstrata.metric) and give that with --import."
        )
    return metrics.build(call)


def describe_metrics(chosen: Sequence[Metric]) -> str:
    """Write metrics as the text of an experiment; functions of a Python program are marked as such."""
    return "+".join(
        f"{_PYTHON}:{one}" if isinstance(one, FunctionMetric) and not metrics.holds(type(one)) else str(one)
        for one in chosen
    )


@dataclass(frozen=True)
class FunctionMetric(Metric):
    """A function of one's own as a metric."""

    function: ClassVar[Function]

    def compute(self, probabilities: np.ndarray, labels: np.ndarray) -> float:
        """Call the function, and insist on one number."""
        try:
            value: Any = type(self).function(probabilities, labels)
        except FedStrataError:
            raise
        except Exception as error:
            raise FedStrataError(
                f"The metric '{self}' failed on probabilities {list(probabilities.shape)} and labels "
                f"{list(labels.shape)} ({type(error).__name__}: {error}); where it is not defined, return math.nan."
            ) from error
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            what = f"an array of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)
            raise FedStrataError(f"The metric '{self}' returned {what[:80]}; it must return one number.") from None


def function_metric(
    function: Function, name: str | None = None, *, higher_is_better: bool | None = True
) -> type[FunctionMetric]:
    """Make a metric of a function that takes probabilities ``[n, classes]`` and labels ``[n]`` as NumPy arrays."""
    known = str(name or getattr(function, "__name__", type(function).__name__))
    if not re.fullmatch(r"[A-Za-z][\w-]*", known):
        raise FedStrataError(f"A metric cannot be called '{known}'; define it with 'def' and a name.")
    made = type(
        str(getattr(function, "__qualname__", known)),
        (FunctionMetric,),
        {
            "__module__": getattr(function, "__module__", __name__),
            "__doc__": function.__doc__ or "A metric without a description.",
            "name": known,
            "kind": metrics.kind,
            "function": staticmethod(function),
            "higher_is_better": higher_is_better,
        },
    )
    return dataclass(frozen=True)(made)


def metric(name: str, *, higher_is_better: bool | None = True) -> Callable[[Function], Function]:
    """Register a function as the metric ``name``, which experiments can then ask for; use it as a decorator.

    ::

        @fedstrata.metric("sureness")
        def sureness(probabilities, labels):
            return probabilities.max(axis=1).mean()
    """

    def decorate(function: Function) -> Function:
        metrics.register(name)(function_metric(function, name, higher_is_better=higher_is_better))
        return function

    return decorate


def further_metrics(given: object, classes: int) -> tuple[Metric, ...]:
    """Read the metrics of a run beside those that are always there, and try each out, so that none fails late."""
    chosen = tuple(one for one in make_metrics(given) if str(one) not in ALWAYS)
    compute(np.full((2 * classes, classes), 1 / classes), np.arange(2 * classes) % classes, chosen)
    return chosen


# Computing ------------------------------------------------------------------------------------------------------------


def score(probabilities: Any, labels: Any, metrics: object = ALWAYS) -> dict[str, float]:
    """Judge probabilities ``[n, classes]`` by labels ``[n]``: one number for each name.

    Arrays and tensors are taken alike. Numbers of single classes are named by their places, as ``recall(of=each).2``,
    and those of a confusion matrix by the true class and the predicted one, as ``confusion.2.0``.

    >>> score([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]], [0, 1, 1], "accuracy+f1+recall:each")["recall(of=each).1"]
    0.5
    """
    named: dict[str, float] = {}
    for name, values in compute(probabilities, labels, make_metrics(metrics)).items():
        for place in np.ndindex(values.shape):
            named[".".join((name, *map(str, place)))] = float(values[place])
    return named


def compute(probabilities: Any, labels: Any, chosen: Sequence[Metric]) -> dict[str, np.ndarray]:
    """Do the same with an array for each metric, whose axes are classes.

    Where a probability is not finite, the model has diverged, and everything is NaN.
    """
    given, truth = _checked(probabilities, labels)
    classes = given.shape[1]
    finite = bool(np.isfinite(given).all())
    found: dict[str, np.ndarray] = {}
    for one in chosen:
        shape = (classes,) * one.axes
        values = np.asarray(one.compute(given, truth), dtype=np.float64) if finite else np.full(shape, math.nan)
        if values.shape != shape:
            raise FedStrataError(
                f"The metric '{one}' returned an array of shape {list(values.shape)} instead of {list(shape)}."
            )
        found[str(one)] = values
    return found


def _checked(probabilities: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Take what is given as NumPy arrays, in double precision; refuse what cannot be judged."""
    given, truth = _as_array(probabilities, "Probabilities", np.float64), _as_array(labels, "Labels")
    if given.ndim == 2 and given.shape[1] == 1:
        raise FedStrataError("There is one class only, so that there is nothing to tell apart; give data with more.")
    if given.ndim != 2 or given.shape[1] < 2 or truth.shape != given.shape[:1]:
        raise FedStrataError(
            f"Probabilities {list(given.shape)} and labels {list(truth.shape)} do not fit: give [n, classes] and [n]."
        )
    if not len(truth):
        raise FedStrataError("There is no sample to judge a model on; give at least one.")
    if not np.issubdtype(truth.dtype, np.integer) or truth.min() < 0 or truth.max() >= given.shape[1]:
        raise FedStrataError(f"Labels must be the places of the classes, whole numbers from 0 to {given.shape[1] - 1}.")
    sums = given.sum(axis=1)
    if (given < 0).any() or (np.abs(sums[np.isfinite(sums)] - 1) > 1e-3).any():
        raise FedStrataError("These are no probabilities, which sum to 1 for each sample; take the softmax of outputs.")
    return given, truth.astype(np.int64, copy=False)


def _as_array(values: Any, what: str, kind: type[np.float64] | None = None) -> np.ndarray:
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype=kind)
    except (TypeError, ValueError) as error:
        raise FedStrataError(
            f"{what} are no array of numbers ({first_line(error)}); give probabilities [n, classes] and labels [n]."
        ) from None


def confusion_matrix(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Count the samples of each class (rows) by the class of the highest probability (columns)."""
    classes = probabilities.shape[1]
    cells = labels * classes + probabilities.argmax(axis=1)
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


def _divided(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divide; where there is nothing to divide by, NaN."""
    divided = np.full(len(numerator), math.nan)
    np.divide(numerator, denominator, out=divided, where=denominator > 0)
    return divided


# The metrics ----------------------------------------------------------------------------------------------------------


@metrics.register("accuracy")
@dataclass(frozen=True)
class Accuracy(Metric):
    """The part of the samples whose class has the highest probability."""

    def compute(self, probabilities: np.ndarray, labels: np.ndarray) -> float:
        """Count the samples that are right."""
        return float((probabilities.argmax(axis=1) == labels).mean())


@metrics.register("loss")
@dataclass(frozen=True)
class LogLoss(Metric):
    r"""The cross entropy :math:`-\frac{1}{n} \sum_i \log p_{i, y_i}`, whatever loss the model was trained with."""

    higher_is_better: ClassVar[bool | None] = False

    def compute(self, probabilities: np.ndarray, labels: np.ndarray) -> float:
        """Take the mean of the negative logarithms."""
        with np.errstate(divide="ignore"):  # of a class that was held impossible it is infinite
            return float(-np.log(probabilities[np.arange(len(labels)), labels]).mean())


@metrics.register("balanced-accuracy")
@dataclass(frozen=True)
class BalancedAccuracy(Metric):
    """The mean over the classes, of those that have samples, of the part of a class's samples that are right.

    Of a client with a single class it is the accuracy.
    """

    def compute(self, probabilities: np.ndarray, labels: np.ndarray) -> float:
        """Take the mean of the recalls."""
        return float(np.nanmean(_recalls(probabilities, labels)))


@dataclass(frozen=True)
class OfClasses(Metric):
    """A metric of each class: their mean over the classes that it is defined for, all of them, or that of one class."""

    of: str | int = parameter(MEAN, "The mean over the classes, each class, or the place of one of them, from 0.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of not in (MEAN, EACH) and (isinstance(self.of, str) or self.of < 0):
            raise FedStrataError(
                f"'{self.of}' does not fit the parameter 'of' of the metric '{self.name}': it takes '{MEAN}', "
                f"'{EACH}', or the place of a class, from 0."
            )

    @property
    def axes(self) -> int:
        """A number for each class, where each is asked for."""
        return 1 if self.of == EACH else 0

    @property
    def tells_of_classes(self) -> bool:
        """Whether single classes are asked for."""
        return self.of != MEAN

    def compute(self, probabilities: np.ndarray, labels: np.ndarray) -> float | np.ndarray:
        """Take what is asked for of the numbers of all classes."""
        classes = probabilities.shape[1]
        if isinstance(self.of, int) and self.of >= classes:
            raise FedStrataError(f"'{self}' asks for class {self.of}, but there are only 0 to {classes - 1}.")
        values = self.of_each(probabilities, labels)
        if self.of == EACH:
            return values
        if isinstance(self.of, int):
            return float(values[self.of])
        return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan

    @abstractmethod
    def of_each(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Compute it for each class ``[classes]``; NaN where it is not defined."""


@metrics.register("f1")
@dataclass(frozen=True)
class F1(OfClasses):
    r"""F1 of a class, :math:`2 TP / (2 TP + FP + FN)`; by default the mean over the classes (macro).

    As in scikit-learn, the mean is over the classes that occur among the labels or the predictions; of any other class
    there is no F1.
    """

    defined_for: ClassVar[str] = "samples or predictions of the class"

    def of_each(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Read it off the confusion matrix."""
        counts = confusion_matrix(probabilities, labels)
        return _divided(2 * np.diag(counts), counts.sum(axis=0) + counts.sum(axis=1))


@metrics.register("recall")
@dataclass(frozen=True)
class Recall(OfClasses):
    """The part of a class's samples that are right; by default the mean over classes, which is the balanced accuracy.

    Where class 1 of two is the positive one, ``recall:1`` is the sensitivity and ``recall:0`` the specificity.
    """

    defined_for: ClassVar[str] = "samples of the class"

    def of_each(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Read it off the confusion matrix."""
        return _recalls(probabilities, labels)


def _recalls(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    counts = confusion_matrix(probabilities, labels)
    return _divided(np.diag(counts), counts.sum(axis=1))


@metrics.register("auc")
@dataclass(frozen=True)
class AreaUnderCurve(OfClasses):
    """The area under the ROC curve of a class against all others; by default the mean over the classes.

    It is the chance that a sample of the class gets a higher probability of it than one of another class, where equal
    probabilities count half. The classes are those that have samples and lack some; of two classes it is the AUC of
    either.
    """

    defined_for: ClassVar[str] = "samples of the class and of others"

    def of_each(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Compare every sample of a class with every other one, by their ranks."""

        def area(own: np.ndarray, others: np.ndarray) -> float:
            others = np.sort(others)
            below = np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right")
            return float(below.mean() / (2 * len(others)))

        return _against_others(probabilities, labels, area)


@metrics.register("average-precision")
@dataclass(frozen=True)
class AveragePrecision(OfClasses):
    r"""The area under the precision-recall curve of a class, :math:`\sum_k (R_k - R_{k-1}) P_k`; by default the mean
    over the classes.

    The classes are those that have samples and lack some: where all samples are of one class it would always be 1.
    Where class 1 of two is the positive one, ``average-precision:1`` is what scikit-learn calls it.
    """

    defined_for: ClassVar[str] = "samples of the class and of others"

    def of_each(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Take the precision at the threshold of each sample of a class, in the mean."""

        def area(own: np.ndarray, others: np.ndarray) -> float:
            own_above = len(own) - np.searchsorted(np.sort(own), own, "left")
            others_above = len(others) - np.searchsorted(np.sort(others), own, "left")
            return float((own_above / (own_above + others_above)).mean())

        return _against_others(probabilities, labels, area)


def _against_others(
    probabilities: np.ndarray, labels: np.ndarray, area: Callable[[np.ndarray, np.ndarray], float]
) -> np.ndarray:
    """Compute something of the probabilities of a class, for its own samples and for all others, for each class."""
    values = np.full(probabilities.shape[1], math.nan)
    for one in np.unique(labels):
        own = labels == one
        if not own.all():
            values[one] = area(probabilities[own, one], probabilities[~own, one])
    return values


@metrics.register("calibration-error")
@dataclass(frozen=True)
class CalibrationError(Metric):
    r"""The expected calibration error: how far the highest probability is from the accuracy, :math:`\sum_b
    \frac{n_b}{n} |acc_b - conf_b|` over equal bins of that probability.

    Guo et al., On Calibration of Modern Neural Networks, ICML 2017, who use 15 bins. With few samples it is too high.

    Defaults:
        bins: paper, Section 4.
    """

    higher_is_better: ClassVar[bool | None] = False

    bins: int = parameter(15, "The number of bins between 0 and 1.", low=1)

    def compute(self, probabilities: np.ndarray, labels: np.ndarray) -> float:
        """Compare confidence and accuracy in each bin."""
        confidence = probabilities.max(axis=1)
        gap = (probabilities.argmax(axis=1) == labels) - confidence
        inside = np.searchsorted(np.arange(1, self.bins) / self.bins, confidence, side="left")
        return float(np.abs(np.bincount(inside, gap, minlength=self.bins)).sum() / len(labels))


@metrics.register("brier")
@dataclass(frozen=True)
class Brier(Metric):
    r"""Brier's score, the squared distance of the probabilities from the truth, from 0 to 2:
    :math:`\frac{1}{n} \sum_i \sum_c (p_{ic} - [y_i = c])^2`.

    Brier, Verification of Forecasts Expressed in Terms of Probability, Monthly Weather Review 1950. Of two classes it
    is twice the number that looks at one of them.
    """

    higher_is_better: ClassVar[bool | None] = False

    def compute(self, probabilities: np.ndarray, labels: np.ndarray) -> float:
        """Take the mean of the squared distances."""
        truth = np.arange(probabilities.shape[1]) == labels[:, None]
        return float(np.square(probabilities - truth).sum(axis=1).mean())


@metrics.register("confusion")
@dataclass(frozen=True)
class Confusion(Metric):
    """The confusion matrix: how many samples of each class (rows) were taken for each class (columns)."""

    higher_is_better: ClassVar[bool | None] = None

    @property
    def axes(self) -> int:
        """The true class and the predicted one."""
        return 2

    def compute(self, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Count."""
        return confusion_matrix(probabilities, labels)
