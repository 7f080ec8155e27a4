"""The losses of an experiment: by hand, against PyTorch, and what training makes of them."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

import fedstrata
from fedstrata.engines.proxy import DataProxy
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.losses import CrossEntropy, Loss, balanced_weights, losses
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import prepare
from fedstrata.testing import check_loss

ALL = (
    "cross-entropy", "cross-entropy(label_smoothing=0.1, weights=balanced)", "cross-entropy(weights='1 2 3 4 5')",
    "focal", "focal(gamma=0.5, weights=balanced)", "focal-of-all", "focal-of-all(weights='0.1 0.2 0.3 0.4 1')",
    "logit-adjusted", "multi-margin",
    "multi-margin(p=2, weights=balanced)",
)  # fmt: skip
SMALL = Experiment(
    clients=3, rounds=1, epochs=1, model="mlp", precision="fp64", partition="dirichlet:0.3", batch_size=32
)

# Two clients, two samples each, three classes; of the second class the second client has nothing.
LOGITS = torch.tensor([[[2.0, 0.0, 1.0], [0.0, 1.0, 0.0]], [[0.0, 3.0, 1.0], [1.0, 1.0, 1.0]]], dtype=torch.float64)
LABELS = torch.tensor([[0, 1], [2, 0]])
COUNTS = torch.tensor([[6, 2, 4], [3, 0, 1]])


def of(text: str, outputs: Tensor = LOGITS, labels: Tensor = LABELS, counts: Tensor = COUNTS) -> Tensor:
    return losses.make(text)(outputs, labels, counts)


def test_the_default_is_the_cross_entropy_to_the_bit() -> None:
    chance = torch.Generator().manual_seed(0)
    outputs, labels = torch.randn(3, 7, 4, generator=chance), torch.randint(4, (3, 7), generator=chance)
    expected = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view(3, 7).mean(1)
    assert Experiment().loss == "cross-entropy"
    assert torch.equal(of(Experiment().loss, outputs, labels, torch.ones(3, 4)), expected)


def test_balanced_weights_by_hand() -> None:
    e = math.e
    first = [math.log(1 + e**-2 + e**-1), math.log(2 + e) - 1]
    second = [math.log(1 + e**3 + e) - 1, math.log(3)]
    # n / (C n_c): 12 / (3 * 6) and 12 / (3 * 2); the second client has two classes: 4 / (2 * 1) and 4 / (2 * 3).
    weights = [[2 / 3, 2.0], [2.0, 2 / 3]]
    expected = [(a * one + b * other) / (a + b) for (a, b), (one, other) in zip(weights, (first, second), strict=True)]
    assert of("cross-entropy(weights=balanced)").tolist() == pytest.approx(expected)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    """For the classes that a client has: its loss cannot tell, since a common factor leaves it as it is."""
    counts = torch.tensor([[6, 2, 0, 4], [1, 0, 0, 3], [5, 5, 5, 5]])
    expected = np.zeros(counts.shape)
    for client, own in enumerate(counts.tolist()):
        labels = np.repeat(np.arange(4), own)
        held = np.unique(labels)
        expected[client, held] = compute_class_weight("balanced", classes=held, y=labels)
    np.testing.assert_allclose(balanced_weights(counts).numpy(), expected)


def test_focal_by_hand() -> None:
    p = math.e**2 / (math.e**2 + 1 + math.e), math.e / (math.e + 2)
    assert of("focal").tolist()[0] == pytest.approx(sum(-((1 - q) ** 2) * math.log(q) for q in p) / 2)
    assert of("focal:0.5").tolist()[0] == pytest.approx(sum(-((1 - q) ** 0.5) * math.log(q) for q in p) / 2)
    assert torch.allclose(of("focal:0"), of("cross-entropy"))


def test_focal_of_all_by_hand() -> None:
    e = math.e
    whole = e**2 + 1 + e
    p, q = (e**2 / whole, 1 / whole, e / whole), (1 / (e + 2), e / (e + 2), 1 / (e + 2))
    # Of the label the weight and what its chance lacks of 1, of the others 1 - weight and their chance.
    first = 0.5 * (1 - p[0]) ** 3 + 0.9 * p[1] ** 3 + 0.75 * p[2] ** 3
    second = 0.5 * q[0] ** 3 + 0.1 * (1 - q[1]) ** 3 + 0.75 * q[2] ** 3
    expected = (-math.log(p[0]) * first - math.log(q[1]) * second) / 3 / 2
    weighted = "focal-of-all(weights=0.5|0.1|0.25, scale=2)"
    assert of(weighted).tolist()[0] == pytest.approx(2 * expected)
    # Weights divide no sum, and without any the label alone counts.
    assert torch.allclose(of("focal-of-all(gamma=2, scale=6)"), 2 * of("focal"))


def test_focal_has_a_gradient_where_a_sample_is_certain() -> None:
    outputs = torch.tensor([[[200.0, 0.0]]], requires_grad=True)
    for text in ("focal:0.5", "focal-of-all(gamma=0.5, weights=0.3|0.7)"):
        [slope] = torch.autograd.grad(of(text, outputs, torch.tensor([[0]]), torch.ones(1, 2)).sum(), outputs)
        assert slope.tolist() == [[[0.0, 0.0]]], text


def test_logit_adjustment_by_hand() -> None:
    e = math.e
    # The first client has classes 1/2, 1/6 and 1/3; the second 3/4 and 1/4, and no second class at all.
    first = [
        -math.log(e**2 / 2 / (e**2 / 2 + 1 / 6 + e / 3)),
        -math.log(e / 6 / (1 / 2 + e / 6 + 1 / 3)),
    ]
    second = [-math.log(e / 4 / (3 / 4 + e / 4)), -math.log(3 / 4)]
    assert of("logit-adjusted").tolist() == pytest.approx([sum(first) / 2, sum(second) / 2])


def test_multi_margin_by_hand() -> None:
    # The first sample lacks nothing of 1 - 2 + 0, and 0 of 1 - 2 + 1; the second 0 and 0.
    # The third: 1 - 1 + 0 = 0, 1 - 1 + 3 = 3; the fourth 1 and 1.
    assert of("multi-margin").tolist() == pytest.approx([0.0, (3 / 3 + 2 / 3) / 2])
    assert of("multi-margin(margin=2, p=2)").tolist() == pytest.approx(
        [((0 + 1) / 3 + (1 + 1) / 3) / 2, ((1 + 16) / 3 + (4 + 4) / 3) / 2]
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, (1.0, 2.5, 4.0)])
def test_cross_entropy_is_that_of_pytorch(smoothing: float, weights: tuple[float, ...] | None) -> None:
    text = None if weights is None else "|".join(map(str, weights))
    given = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    found = CrossEntropy(label_smoothing=smoothing, weights=text)(LOGITS, LABELS, COUNTS)
    expected = [
        F.cross_entropy(LOGITS[client], LABELS[client], weight=given, label_smoothing=smoothing) for client in range(2)
    ]
    assert torch.allclose(found, torch.stack(expected), rtol=1e-12)


@pytest.mark.parametrize("p", [1, 2])
def test_multi_margin_is_that_of_pytorch(p: int) -> None:
    expected = [F.multi_margin_loss(LOGITS[client], LABELS[client], p=p, margin=0.5) for client in range(2)]
    assert torch.allclose(of(f"multi-margin(margin=0.5, p={p})"), torch.stack(expected), rtol=1e-12)


def test_of_two_classes_weights_are_pos_weight() -> None:
    outputs, labels = LOGITS[:1, :, :2], torch.tensor([[0, 1]])
    difference = outputs[0, :, 1] - outputs[0, :, 0]
    summed = F.binary_cross_entropy_with_logits(
        difference, labels[0].double(), pos_weight=torch.tensor(4.0), reduction="sum"
    )
    found = of("cross-entropy(weights=1|4)", outputs, labels, torch.ones(1, 2))
    assert found.item() == pytest.approx(summed.item() / (1 + 4))


@pytest.mark.parametrize("text", ALL)
def test_every_loss_can_be_federated(text: str) -> None:
    check_loss(text)


def test_every_loss_tells_what_it_is() -> None:
    assert losses.names() == ["cross-entropy", "focal", "focal-of-all", "logit-adjusted", "multi-margin"]
    assert losses.group == "fedstrata.losses"
    for name in losses.names():
        told = losses.describe(name)
        assert told["summary"]
        assert all(one["meaning"] for one in told["parameters"])


def trained(**changes: object) -> dict[str, Tensor]:
    driver = Driver.prepare(SMALL.with_changes(dict(changes)))
    driver.step()
    return driver.engine.server.model


@pytest.mark.parametrize("text", ["cross-entropy(label_smoothing=0.1, weights=balanced)", "focal", "logit-adjusted"])
def test_both_engines_train_alike_with_a_loss(text: str) -> None:
    loop, stacked = (trained(loss=text, engine=engine) for engine in ("loop", "stacked"))
    plain = trained(engine="loop")
    for name, tensor in loop.items():
        assert torch.allclose(tensor, stacked[name], rtol=1e-9, atol=1e-12)
    assert any(not torch.allclose(tensor, plain[name], rtol=1e-3) for name, tensor in loop.items())


# The loss that tests tell ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["focal:1", "focal-of-all(gamma=1, scale=2)", "multi-margin"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_models_are_tested_by_another_loss_and_trained_as_before(text: str, engine: str) -> None:
    small = SMALL.with_changes({"engine": engine, "validation_fraction": 0.2})
    plain, other = (Driver.prepare(small.with_changes({"test_loss": test})) for test in ("cross-entropy", text))
    for driver in (plain, other):
        driver.step()
    for name, tensor in plain.engine.server.model.items():
        assert torch.equal(tensor, other.engine.server.model[name])
    first, second = plain.metrics.latest(), other.metrics.latest()
    told = [name for name in first if ".loss" in name and not name.startswith("train")]
    assert {"global.loss", "client_after.loss.mean"} <= set(told)
    assert all(first[name] != second[name] for name in told)
    judged = [one.metrics.of_clients("client_before_validation.loss") for one in (plain, other)]
    assert all(judged[0][client] != judged[1][client] for client in range(3))
    assert first["client_after.accuracy.mean"] == second["client_after.accuracy.mean"]
    # The global one by hand.
    setting, dataset = other.engine.setting, other.engine.evaluator.data.dataset
    positions = torch.from_numpy(dataset.test)[None]
    inputs, labels = other.engine.evaluator.data.make(positions, None)
    model = {name: tensor[None] for name, tensor in other.engine.server.model.items()}
    buffers = {name: model.pop(name) for name in setting.layers.buffer_names}
    keys = torch.zeros(1, 2, dtype=torch.int64)
    outputs, _ = other.engine.forward(model, buffers, inputs, keys, training=False)
    expected = losses.make(text)(outputs, labels, torch.ones(1, outputs.shape[-1])).item()
    assert second["global.loss"] == pytest.approx(expected)


@pytest.mark.parametrize("text", ["focal(weights=balanced)", "logit-adjusted", "multi-margin(weights=balanced)"])
def test_a_loss_that_weighs_samples_is_no_test(text: str) -> None:
    with pytest.raises(FedStrataError, match=r"Models cannot be tested by the loss '.*', which weighs samples"):
        prepare(SMALL.with_changes({"test_loss": text}))


def test_a_loss_that_says_it_judges_and_does_not_is_found_out() -> None:
    @dataclass(frozen=True)
    class Partial(Loss):
        name = "partial"

        @property
        def judges(self) -> bool:
            return True

        def samples(self, outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
            return CrossEntropy().samples(outputs, labels, counts) * counts.sum(1, keepdim=True)

    with pytest.raises(AssertionError, match="depends on the classes of the client"):
        check_loss(Partial())


def test_one_step_follows_the_gradient_of_the_loss() -> None:
    ready = prepare(SMALL.with_changes({"clients": 1, "loss": "cross-entropy(weights=balanced)", "partition": "iid"}))
    whole = len(ready.split.train[0])
    experiment = SMALL.with_changes(
        {"clients": 1, "loss": "cross-entropy(weights=balanced)", "partition": "iid", "steps": 1, "engine": "loop",
         "optimiser": "sgd(learning_rate=0.5)", "batch_size": whole}
    )  # fmt: skip
    driver = Driver.prepare(experiment)
    before = {name: tensor.clone().requires_grad_() for name, tensor in driver.setting.initial.items()}
    positions = torch.from_numpy(ready.split.train[0])
    inputs, labels = ready.data.make(positions[None], None)
    model = ready.model.eval()
    outputs = torch.func.functional_call(model, before, (inputs[0],))
    counts = torch.bincount(labels[0], minlength=10)
    weights = len(positions) / (10 * counts.double())
    loss = F.cross_entropy(outputs, labels[0], weight=weights)
    slopes = torch.autograd.grad(loss, list(before.values()))
    driver.step()
    for (name, tensor), slope in zip(before.items(), slopes, strict=True):
        expected = tensor.detach() - 0.5 * slope
        assert torch.allclose(driver.engine.server.model[name], expected, rtol=1e-9, atol=1e-12), name
    assert driver.metrics.latest()["train.loss"] == pytest.approx(loss.item())


def test_surveys_follow_the_loss_and_tests_do_not() -> None:
    """The gradients of PLayer-FL's survey are those of the loss; the reported test loss is the cross entropy."""
    for text in ("cross-entropy", "multi-margin"):
        driver = Driver.prepare(SMALL.with_changes({"loss": text, "engine": "loop"}))
        side = driver.engine.members[0].side  # type: ignore[attr-defined]
        model = {name: tensor[None] for name, tensor in driver.setting.initial.items()}
        probe = side.probe([0], 1)
        gradients = probe.gradients(model, batch_size=8, all_samples=True)
        positions = torch.from_numpy(driver.split.train[0])
        inputs, labels = side.data.make(positions[None], None)
        start = {name: tensor.clone().requires_grad_() for name, tensor in driver.setting.initial.items()}
        outputs = torch.func.functional_call(side.forward.model.eval(), start, (inputs[0],))
        loss = (F.cross_entropy if text == "cross-entropy" else F.multi_margin_loss)(outputs, labels[0])
        expected = torch.autograd.grad(loss, list(start.values()))
        for (name, _), slope in zip(start.items(), expected, strict=True):
            assert torch.allclose(gradients[name][0], slope, rtol=1e-6, atol=1e-9)
        _, tested = probe.test(model)
        assert tested.item() == pytest.approx(F.cross_entropy(outputs, labels[0]).item(), rel=1e-6)


def test_the_server_of_fedlaw_learns_with_the_loss_of_its_own_samples() -> None:
    text = "cross-entropy(weights=balanced)"
    driver = Driver.prepare(SMALL.with_changes({"method": "fedlaw(samples=35)", "loss": text, "engine": "loop"}))
    proxy = driver.engine.side.proxy
    assert isinstance(proxy, DataProxy)
    parameters = {name: driver.setting.initial[name][None] for name in driver.setting.layers.parameter_names}
    loss, _ = proxy.loss(parameters, {}, 0, torch.arange(proxy.size))
    inputs, labels = proxy.data.make(torch.from_numpy(proxy.samples)[None], None)
    outputs = torch.func.functional_call(
        proxy.forward.model.eval(),  # type: ignore[attr-defined]
        {name: tensor[0] for name, tensor in parameters.items()},
        (inputs[0],),
    )
    counts = torch.bincount(labels[0], minlength=10).double()
    weights = 35 / ((counts > 0).sum() * counts.clamp(min=1))
    assert loss.item() == pytest.approx(F.cross_entropy(outputs, labels[0], weight=weights).item())
    assert loss.item() != pytest.approx(F.cross_entropy(outputs, labels[0]).item())


def test_a_method_with_a_loss_of_its_own_refuses_another() -> None:
    for method in ("fedir", "fedrod+fedprox"):
        with pytest.raises(FedStrataError, match=r"'focal' would have no effect: 'fed(ir|rod)' decides the local loss"):
            prepare(SMALL.with_changes({"method": method, "loss": "focal"}))
    prepare(SMALL.with_changes({"method": "fedir", "loss": "cross-entropy(label_smoothing=0)"}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cross-entropy(weights=1|2)", "has 2 weights, but the data has 10 classes"),
        ("cross-entropy(weights=some)", "'some' does not fit the parameter 'weights' of the loss 'cross-entropy'"),
        ("focal(weights='1, -2')", "a number above 0 for each class"),
        ("focal-of-all(weights='0.5|2')", "a number above 0 and up to 1 for each class"),
        ("focal-of-all(weights=balanced)", "a number above 0 and up to 1 for each class"),
        ("focal+multi-margin", "names 2 losses; give exactly one"),
        ("crossentropy", "Did you mean 'cross-entropy'"),
        ("logit-adjusted:0", "more than 0"),
    ],
)
def test_what_is_no_loss_gets_a_sentence(text: str, words: str) -> None:
    with pytest.raises(FedStrataError, match=words):
        prepare(SMALL.with_changes({"loss": text}))


OWN_LOSS = '''
from dataclasses import dataclass
from fedstrata.losses import Loss, losses

@losses.register("own-squared")
@dataclass(frozen=True)
class Squared(Loss):
    """The squared distance of the probability of the label from 1."""

    def samples(self, outputs, labels, counts):
        return (1 - outputs.softmax(-1).gather(-1, labels[..., None]).squeeze(-1)) ** 2
'''


def test_a_file_can_bring_a_loss(tmp_path: Path) -> None:
    file = tmp_path / "own_loss.py"
    file.write_text(OWN_LOSS)
    result = fedstrata.run(SMALL, imports=[str(file)], loss="own-squared")
    assert result.metrics.latest()["train.loss"] <= 1
    check_loss("own-squared")


@dataclass(frozen=True)
class Careless(Loss):
    """A loss that forgets that there are several clients."""

    def samples(self, outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Take the mean over everything."""
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Mixing(Loss):
    """A loss that looks at all clients."""

    def samples(self, outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Divide by something of everybody."""
        return outputs.gather(-1, labels[..., None]).squeeze(-1) / outputs.detach().abs().sum()


def test_careless_losses_are_found() -> None:
    with pytest.raises(FedStrataError, match=r"every sample of every client, \[2, 2\], and returned a tens"):
        Careless()(LOGITS, LABELS, COUNTS)
    with pytest.raises(AssertionError, match=r"cannot be used: .*do not take the mean"):
        check_loss(Careless())
    with pytest.raises(AssertionError, match="depends on the other clients"):
        check_loss(Mixing())
