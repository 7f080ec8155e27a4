"""Building a model from a name, a spec, a module or a function, and the sentences about models that do not fit."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import fedstrata
from fedstrata.data import from_arrays
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.models import build_model, models
from fedstrata.runs.preparing import Ingredients, prepare
from fedstrata.testing import check_model


class Tiny(nn.Module):
    """A user's own model, with everything that a careless check would change."""

    calls = 0
    seen: Tensor

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        noisy = self.norm(inputs) + torch.rand(4)
        scores: Tensor = self.head(noisy)
        return scores


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_name_and_its_spec_build_the_same() -> None:
    by_name = build_model("mlp(hidden=8)", (4,), 3, seed=5)
    assert same(state(by_name), state(build_model(models.make("mlp:8"), (4,), 3, seed=5)))


def test_a_given_module_is_copied_and_left_alone() -> None:
    model = Tiny()
    model.norm.eval()
    before, generator = state(model), torch.get_rng_state()
    built = build_model(model, (4,), 3, seed=0)
    assert isinstance(built, Tiny)
    assert built is not model
    assert same(state(built), before)
    assert same(state(model), before)
    assert model.calls == built.calls == 0
    assert [module.training for module in model.modules()] == [True, False, True]
    assert [module.training for module in built.modules()] == [True, False, True]
    assert torch.equal(torch.get_rng_state(), generator)
    with torch.no_grad():
        built.get_parameter("head.bias").add_(1)
    assert same(state(model), before)


def test_functions_with_no_or_two_arguments() -> None:
    def sized(input_shape: tuple[int, ...], classes: int, width: int = 6) -> nn.Module:
        return nn.Sequential(nn.Linear(input_shape[0], width), nn.Linear(width, classes))

    torch.manual_seed(3)
    generator = torch.get_rng_state()
    for function in (Tiny, lambda: Tiny(3), sized):
        first, again, other = (state(build_model(function, (4,), 3, seed=seed)) for seed in (0, 0, 1))
        assert same(first, again)
        assert not same(first, other)
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_default_device_of_the_user_does_not_matter() -> None:
    with torch.device("meta"):
        model = build_model("cnn", (1, 8, 8), 10, seed=0)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_a_double_model_is_tried_with_double_samples() -> None:
    assert build_model(nn.Linear(4, 3).double(), (4,), 3, seed=0)


def test_a_model_of_tokens_is_tried_with_a_sample() -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3))
    with pytest.raises(FedStrataError, match=r"'Sequential' cannot take inputs of shape \(5,\) and type torch.float32"):
        build_model(model, (5,), 3, seed=0)
    assert build_model(model, (5,), 3, seed=0, sample=torch.ones(1, 5, dtype=torch.int64))


def test_the_output_must_fit_the_classes() -> None:
    with pytest.raises(FedStrataError, match=r"'Tiny' turns 2 samples into .* \[2, 3\].* 7 classes and needs \[2, 7\]"):
        build_model(Tiny, (4,), 7, seed=0)
    with pytest.raises(FedStrataError, match=r"output of shape \[8\]"):
        build_model(nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)), (4,), 4, seed=0)


def test_whole_numbers_in_a_model_of_quantities_get_advice() -> None:
    with pytest.raises(FedStrataError, match="give inputs that are quantities as float32"):
        build_model("mlp", (5,), 3, seed=0, sample=torch.ones(1, 5, dtype=torch.int64))


def test_the_output_must_be_scores() -> None:
    class Decided(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs).round().long()

    with pytest.raises(FedStrataError, match="'Decided' returns int64 values, from which nothing can be learned"):
        build_model(Decided(4, 3), (4,), 3, seed=0)
    with pytest.warns(FedStrataWarning, match="are probabilities, as after a softmax"):
        build_model(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), (4,), 3, seed=0)


def test_compiled_models_are_taken_as_they_were() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for given in (
        torch.compile(plain, backend="eager"),
        lambda: torch.compile(Tiny(), backend="eager"),
        nn.Sequential(torch.compile(plain[0], backend="eager"), plain[1]),
    ):
        model = build_model(given, (4,), 3, seed=0)
        assert not any("_orig_mod" in name for name, _ in model.named_modules())
        assert type(model) in (nn.Sequential, Tiny)
    compiled = torch.compile(plain, backend="eager")
    assert Ingredients(model=compiled).describe(Experiment()).model == "python:Sequential"


def test_a_model_without_length_is_used_all_the_same() -> None:
    class Empty(nn.Sequential):
        """Has weights, but nothing in its list."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64, 10))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.flatten(1) @ self.weight

    assert len(Empty()) == 0
    assert list(prepare(Experiment(clients=2), Ingredients(model=Empty())).setting.initial) == ["weight"]


@pytest.mark.parametrize("pooled", ["mean", "sum", "max", None])
@pytest.mark.parametrize("padding", [None, 0])
def test_models_of_tokens_are_trained_alike_by_both_engines(pooled: str | None, padding: int | None) -> None:
    class Words(nn.Module):
        """Tells texts apart by their words."""

        def __init__(self) -> None:
            super().__init__()
            self.words = (
                nn.Embedding(20, 6, padding_idx=padding)
                if pooled is None
                else nn.EmbeddingBag(20, 6, mode=pooled, padding_idx=padding)
            )
            self.head = nn.Linear(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            found = self.words(tokens)
            return self.head(found if pooled else found.mean(1))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_model(Words, input_shape=(5,), classes=3, tokens=20)


def test_a_text_classifier_learns_from_whole_numbers() -> None:
    tokens = torch.randint(1, 20, (200, 6), generator=torch.Generator().manual_seed(0))
    data = from_arrays(tokens, torch.where((tokens == 7).any(1), 1, 0).tolist(), class_names=("without", "with"))
    result = fedstrata.run(
        data=data,
        model=lambda: nn.Sequential(nn.EmbeddingBag(20, 8, mode="max"), nn.Linear(8, 2)),
        clients=2,
        partition="iid",
        rounds=5,
        engine="stacked",
    )
    assert result.summary["final"]["client_after.accuracy.mean"] > 0.95


def test_the_output_must_be_a_tensor() -> None:
    with pytest.raises(FedStrataError, match="'LSTM' returns a tuple; it must return one tensor"):
        build_model(nn.LSTM(4, 3), (4,), 3, seed=0)


def test_a_model_that_cannot_take_the_input_is_named_with_the_shape_and_the_reason() -> None:
    with pytest.raises(FedStrataError) as caught:
        build_model(nn.Linear(4, 3), (5,), 3, seed=0)
    text = str(caught.value)
    assert text.startswith("The model 'Linear' cannot take inputs of shape (5,) and type torch.float32: ")
    assert "shapes cannot be multiplied" in text
    assert "\n" not in text


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(FedStrataError, match=r"There is no model 'resnet9'\. Did you mean"):
        build_model("resnet9", (3, 32, 32), 10, seed=0)
    with pytest.raises(FedStrataError, match="7 is no model"):
        build_model(7, (4,), 3, seed=0)  # type: ignore[arg-type]
    with pytest.raises(FedStrataError, match="'<lambda>' needs 1 arguments; it must take none or two"):
        build_model(lambda classes: Tiny(classes), (4,), 3, seed=0)
    with pytest.raises(FedStrataError, match="returned a int; it must return an"):
        build_model(lambda: 3, (4,), 3, seed=0)  # type: ignore[arg-type, return-value]
    with pytest.raises(FedStrataError, match="'Identity' has no parameters"):
        build_model(nn.Identity(), (3,), 3, seed=0)
    with pytest.raises(FedStrataError, match="'weight' of the model 'LazyLinear' has no size yet"):
        build_model(nn.LazyLinear(3), (4,), 3, seed=0)


def test_a_module_that_cannot_be_copied_is_named() -> None:
    model = nn.Linear(4, 3)
    model.cache = model.weight * 2
    with pytest.raises(FedStrataError, match="'Linear' cannot be copied"):
        build_model(model, (4,), 3, seed=0)


def frozen_at_the_bottom() -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    network[0].requires_grad_(False)
    return network


def test_frozen_parameters_are_refused_wherever_a_run_is_prepared() -> None:
    sentence = (
        r"The parameters 0\.weight, 0\.bias of the model are frozen \(requires_grad=False\), but all parameters are "
        r"trained here: unfreeze them with requires_grad_\(True\); or compute what the frozen part gives once"
    )
    data = from_arrays(torch.randn(40, 4), torch.arange(40) % 3)
    for model in (frozen_at_the_bottom(), frozen_at_the_bottom):
        with pytest.raises(FedStrataError, match=sentence):
            fedstrata.run(data=data, model=model, clients=2, rounds=1)
        with pytest.raises(AssertionError, match=sentence):
            check_model(model, (4,), 3)
    with pytest.raises(FedStrataError, match="^" + sentence):  # before any run begins
        fedstrata.compare("fedavg, local", data=data, model=frozen_at_the_bottom(), clients=2, rounds=1)


def test_of_many_frozen_parameters_three_are_named() -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    data = from_arrays(torch.randn(40, 4), torch.arange(40) % 3)
    network.requires_grad_(False)
    with pytest.raises(FedStrataError, match=r"parameters 0\.weight, 0\.bias, 1\.weight and 3 more of the model are"):
        fedstrata.run(data=data, model=network, clients=2, rounds=1)
    network.requires_grad_(True)[2].bias.requires_grad_(False)
    with pytest.raises(FedStrataError, match=r"The parameter 2\.bias of the model is frozen .*: unfreeze it with"):
        fedstrata.run(data=data, model=network, clients=2, rounds=1)
    assert fedstrata.run(data=data, model=network.requires_grad_(True), clients=2, rounds=1).summary["rounds"] == 1
