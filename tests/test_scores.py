"""Metrics of classifiers: by hand, and against scikit-learn and torchmetrics."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from fedstrata.errors import FedStrataError
from fedstrata.scores import describe_metrics, make_metrics, metric, metrics, score

# Three classes, five samples: labels 0 0 1 1 2, predictions 0 1 1 1 0.
PROBABILITIES = np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.1, 0.8, 0.1], [0.2, 0.5, 0.3], [0.5, 0.1, 0.4]])
LABELS = np.array([0, 0, 1, 1, 2])


def test_numbers_of_a_confusion_matrix_by_hand() -> None:
    found = score(PROBABILITIES, LABELS, "accuracy+balanced-accuracy+f1+f1:each+recall:each+recall:2+confusion")
    assert found["accuracy"] == 0.6
    assert found["balanced-accuracy"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    # Class 0: TP 1, FP 1, FN 1. Class 1: TP 2, FP 1, FN 0. Class 2: FN 1.
    each = [2 / 4, 4 / 5, 0]
    assert [found[f"f1(of=each).{one}"] for one in range(3)] == pytest.approx(each)
    assert found["f1"] == pytest.approx(sum(each) / 3)
    assert [found[f"recall(of=each).{one}"] for one in range(3)] == [0.5, 1.0, 0.0]
    assert found["recall(of=2)"] == 0.0
    assert [[found[f"confusion.{row}.{column}"] for column in range(3)] for row in range(3)] == [
        [1, 1, 0],
        [0, 2, 0],
        [1, 0, 0],
    ]


def test_a_class_without_samples_does_not_count_in_balanced_accuracy() -> None:
    """Half of the first class and all of the second; of the third, which nobody has, there is nothing to be right."""
    found = score([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1]], [0, 0, 1], "balanced-accuracy")
    assert found["balanced-accuracy"] == 0.75


def test_curves_by_hand() -> None:
    found = score(PROBABILITIES, LABELS, "auc:each+average-precision:each+auc+average-precision")
    # Class 0, own 0.7 and 0.3, others 0.1, 0.2, 0.5: 3 and 2 of 3 pairs are in order; precision 1/1 and 2/3.
    # Class 1, own 0.8 and 0.5, others 0.2, 0.6, 0.1: 3 and 2 of 3; precision 1/1 and 2/3.
    # Class 2, own 0.4, others 0.1, 0.1, 0.1, 0.3: all in order.
    assert [found[f"auc(of=each).{one}"] for one in range(3)] == pytest.approx([5 / 6, 5 / 6, 1])
    assert [found[f"average-precision(of=each).{one}"] for one in range(3)] == pytest.approx([5 / 6, 5 / 6, 1])
    assert [found["auc"], found["average-precision"]] == pytest.approx([(5 / 6 + 5 / 6 + 1) / 3] * 2)


def test_equal_probabilities_count_half() -> None:
    found = score([[0.5, 0.5]] * 4, [0, 0, 0, 1], "auc+average-precision:1")
    assert found == {"auc": 0.5, "average-precision(of=1)": 0.25}


def test_probabilities_as_such_by_hand() -> None:
    found = score([[0.9, 0.1], [0.7, 0.3], [0.35, 0.65]], [0, 1, 1], "loss+brier+calibration-error+calibration-error:2")
    assert found["loss"] == pytest.approx(-(math.log(0.9) + math.log(0.3) + math.log(0.65)) / 3)
    assert found["brier"] == pytest.approx(2 * (0.01 + 0.49 + 0.1225) / 3)
    assert found["calibration-error"] == pytest.approx((0.1 + 0.7 + 0.35) / 3)  # three bins of 15, one sample each
    assert found["calibration-error(bins=2)"] == pytest.approx(abs(2 - 0.9 - 0.7 - 0.65) / 3)  # all in the upper half


def test_what_the_labels_do_not_define_is_nan_and_never_0() -> None:
    found = score([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1]], [0, 0], "auc+average-precision+auc:1+recall:1+f1:each+f1+recall")
    undefined = [name for name, value in found.items() if math.isnan(value)]
    assert undefined == [
        "auc", "average-precision", "auc(of=1)", "recall(of=1)", "f1(of=each).1", "f1(of=each).2",
    ]  # fmt: skip
    assert found["f1"] == found["recall"] == 1.0  # of the classes that are there


def test_a_diverged_model_has_no_numbers() -> None:
    found = score([[math.nan, math.nan], [0.5, 0.5]], [0, 1], "accuracy+auc+confusion")
    assert len(found) == 6
    assert all(math.isnan(value) for value in found.values())


@st.composite
def predictions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    classes, samples, seed = draw(st.integers(2, 6)), draw(st.integers(12, 60)), draw(st.integers(0, 2**16))
    chance = np.random.default_rng(seed)
    coarse = np.round(chance.random((samples, classes)), 1) + 0.05  # ties occur
    labels = np.concatenate([np.arange(classes), chance.integers(0, classes, samples - classes)])
    return coarse / coarse.sum(axis=1, keepdims=True), labels


@given(predictions())
def test_scikit_learn_says_the_same(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    probabilities, labels = drawn
    predicted, classes = probabilities.argmax(1), probabilities.shape[1]
    one_hot = np.eye(classes)[labels]
    expected = {
        "accuracy": sk.accuracy_score(labels, predicted),
        "loss": sk.log_loss(labels, probabilities),
        "balanced-accuracy": sk.balanced_accuracy_score(labels, predicted),
        "f1": sk.f1_score(labels, predicted, average="macro"),
        "auc": sk.roc_auc_score(one_hot, probabilities, average="macro"),
        "average-precision": sk.average_precision_score(one_hot, probabilities, average="macro"),
        "average-precision(of=1)": sk.average_precision_score(labels == 1, probabilities[:, 1]),
    }
    found = score(probabilities, labels, "+".join(expected))
    assert found == pytest.approx(expected, abs=1e-12)
    confusion = score(probabilities, labels, "confusion")
    assert np.array_equal(
        np.array(list(confusion.values())).reshape(classes, classes), sk.confusion_matrix(labels, predicted)
    )


def test_a_confidence_on_the_border_of_two_bins_belongs_to_the_lower_one() -> None:
    """As in Guo et al., whose bins are closed above; torchmetrics closes them below."""
    probabilities, labels = [[0.5, 0.25, 0.25], [0.625, 0.25, 0.125]], [1, 0]
    # Bins (0, 0.5] and (0.5, 1]: |0 - 0.5| and |1 - 0.625|; together in one they were |1 - 1.125|.
    found = score(probabilities, labels, "calibration-error:2")
    assert found["calibration-error(bins=2)"] == (0.5 + 0.375) / 2
    classification = pytest.importorskip("torchmetrics.functional.classification")
    theirs = classification.multiclass_calibration_error(torch.tensor(probabilities), torch.tensor(labels), 3, 2)
    assert float(theirs) == 0.125 / 2


@pytest.mark.parametrize("bins", [25, 100])
def test_every_border_belongs_to_the_lower_bin(bins: int) -> None:
    """A confidence of k / bins, with one in the middle of the bin below it: right and wrong, so that gaps cancel.

    As 14 / 25 * 25 is more than 14, a product would put it above the border.
    """
    for border in range(bins // 2 + 1, bins):  # of two classes, the highest probability is at least a half
        confidence, middle = border / bins, (border - 0.5) / bins
        found = score([[confidence, 1 - confidence], [middle, 1 - middle]], [0, 1], f"calibration-error:{bins}")
        [error] = found.values()
        assert error == pytest.approx(abs(1 - confidence - middle) / 2), border


@pytest.mark.parametrize(
    ("probabilities", "labels", "said"),
    [
        ([[0.5, 0.5], [1.0]], [0, 1], r"Probabilities are no array of numbers \(.*inhomogeneous.*\); give"),
        ([["a", "b"]], [0], r"Probabilities are no array of numbers \(could not convert"),
        ([[0.5, 0.5]], [[0], [0, 1]], r"Labels are no array of numbers"),
        ([[0.5, 0.5]], ["yes"], "Labels must be the places of the classes"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(probabilities: object, labels: object, said: str) -> None:
    with pytest.raises(FedStrataError, match=said):
        score(probabilities, labels)


def test_torchmetrics_says_the_same() -> None:
    classification = pytest.importorskip("torchmetrics.functional.classification")
    outputs = torch.randn(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probabilities, labels = outputs.softmax(1), torch.arange(200) % 5
    found = score(probabilities, labels, "f1+f1:each+recall+auc+average-precision+calibration-error")
    expected = {
        "f1": classification.multiclass_f1_score(probabilities, labels, 5, average="macro"),
        "recall": classification.multiclass_recall(probabilities, labels, 5, average="macro"),
        "auc": classification.multiclass_auroc(probabilities, labels, 5, average="macro"),
        "average-precision": classification.multiclass_average_precision(probabilities, labels, 5, average="macro"),
        "calibration-error": classification.multiclass_calibration_error(probabilities, labels, 5, n_bins=15),
    }
    each = classification.multiclass_f1_score(probabilities, labels, 5, average="none")
    expected |= {f"f1(of=each).{place}": value for place, value in enumerate(each)}
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-6)


def test_every_metric_tells_what_it_is() -> None:
    for name in metrics.names():
        told = metrics.describe(name)
        assert told["summary"]
        assert all(one["meaning"] for one in told["parameters"])


def sureness(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean of the highest probability."""
    return float(probabilities.max(axis=1).mean())


def test_a_function_is_a_metric() -> None:
    found = score(torch.tensor(PROBABILITIES), torch.tensor(LABELS), ["accuracy", sureness])
    assert found == {"accuracy": 0.6, "sureness": pytest.approx((0.7 + 0.6 + 0.8 + 0.5 + 0.5) / 5)}
    assert describe_metrics(make_metrics(["f1:1", sureness])) == "f1(of=1)+python:sureness"
    with pytest.raises(FedStrataError, match="'sureness' is a function of a Python program"):
        make_metrics("f1+python:sureness")


def test_a_function_can_be_registered() -> None:
    try:
        assert metric("test-sureness", higher_is_better=None)(sureness) is sureness
        assert score(PROBABILITIES, LABELS, "test-sureness") == {"test-sureness": pytest.approx(0.62)}
        assert metrics.describe("test-sureness")["summary"] == "The mean of the highest probability."
        assert describe_metrics(make_metrics("test-sureness")) == "test-sureness"
    finally:
        metrics.put("test-sureness", None)


def nothing(probabilities: np.ndarray, labels: np.ndarray) -> None:
    return None


def several(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return probabilities


def f1(probabilities: np.ndarray, labels: np.ndarray) -> float:
    return 0.0


def one_more() -> Callable[[np.ndarray, np.ndarray], float]:
    def own(probabilities: np.ndarray, labels: np.ndarray) -> float:
        return 0.0

    return own


def fails(probabilities: np.ndarray, labels: np.ndarray) -> float:
    raise ValueError("only one class")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (nothing, "'nothing' returned None; it must return one number"),
        (several, r"'several' returned an array of shape \[5, 3\]; it must return one number"),
        (fails, r"'fails' failed .*ValueError: only one class.* return math.nan"),
        (lambda probabilities, labels: 1.0, "cannot be called '<lambda>'"),
        (["f1", f1], "There is already a metric 'f1'; rename your function"),
        ([one_more(), one_more()], "Two different metrics are called 'own'"),
        ("f2", "no metric 'f2'"),
        ("recall:3", "only 0 to 2"),
        ("f1:some", "'some' does not fit the parameter 'of'"),
        ("f1:-1", "'-1' does not fit the parameter 'of'"),
        (7, "7 is no metric"),
    ],
)
def test_what_is_no_metric_gets_a_sentence(given: object, words: str) -> None:
    with pytest.raises(FedStrataError, match=words):
        score(PROBABILITIES, LABELS, given)


@pytest.mark.parametrize(
    ("probabilities", "labels", "words"),
    [
        ([[2.0, 1.0]], [0], "no probabilities"),
        ([[1.5, -0.5]], [0], "no probabilities"),
        ([[0.5, 0.5]], [2], "whole numbers from 0 to 1"),
        ([[0.5, 0.5]], [0.0], "whole numbers from 0 to 1"),
        ([[0.5, 0.5]], [0, 1], r"\[1, 2\] and labels \[2\] do not fit"),
        (np.empty((0, 2)), np.empty(0, dtype=int), "no sample"),
    ],
)
def test_what_cannot_be_judged_gets_a_sentence(probabilities: object, labels: object, words: str) -> None:
    with pytest.raises(FedStrataError, match=words):
        score(probabilities, labels)


def test_of_one_class_nothing_can_be_told_apart():
    with pytest.raises(FedStrataError, match="There is one class only"):
        score(np.ones((2, 1)), np.zeros(2, dtype=int), "f1")
