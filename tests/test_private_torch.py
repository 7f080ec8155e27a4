from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from fedstrata import optimisers, private_torch
from fedstrata.optimisers import optimisers as registered
from fedstrata.private_torch import (
    CallingPrivately,
    ForEach,
    at_once,
    calling_documented,
    differs_documented,
    one_by_one,
    opened,
    step_out_documented,
    step_out_privately,
)


def import_anew():
    spec = spec_from_file_location("private_torch_once_more", private_torch.__file__)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_fast_way_works_with_this_version_of_pytorch():
    """When this fails with a new PyTorch, runs are slower on a GPU: look for the new names of what is gone."""
    assert private_torch.for_all_clients is step_out_privately
    assert private_torch.differs_between_clients is torch._C._functorch.is_batchedtensor
    assert vars(private_torch.for_each).keys() == {
        "add", "add_", "sub", "sub_", "mul", "mul_", "div_", "lerp_", "addcmul_", "sqrt", "copy_", "zero_", "norm",
    }  # fmt: skip
    assert all(operation is getattr(torch, f"_foreach_{name}") for name, operation in vars(ForEach(at_once)).items())
    assert opened(F.multi_head_attention_forward) is not None
    assert private_torch.calling is CallingPrivately


@pytest.mark.parametrize("gone", ["torch._functorch.pyfunctorch", "torch._C._functorch"])
def test_where_a_private_module_is_gone_the_documented_way_is_taken(gone, monkeypatch):
    monkeypatch.setitem(sys.modules, gone, None)
    module = import_anew()
    assert module.for_all_clients is module.step_out_documented
    assert module.differs_between_clients is module.differs_documented


def test_where_a_private_call_is_gone_or_does_something_else_the_documented_way_is_taken(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(torch._C._functorch, "_unwrap_batched")
        assert import_anew().for_all_clients.__name__ == "step_out_documented"
    with monkeypatch.context() as patch:
        patch.setattr(torch._C._functorch, "_unwrap_batched", lambda tensor, level: (torch.zeros(2, 2), 0))
        assert import_anew().for_all_clients.__name__ == "step_out_documented"
    assert import_anew().for_all_clients.__name__ == "step_out_privately"
    monkeypatch.delattr(torch, "_foreach_add_")
    tensors = [torch.zeros(2), torch.ones(1)]
    import_anew().for_each.add_(tensors, 1)
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [2]]


@pytest.mark.parametrize("way", [step_out_privately, step_out_documented])
def test_the_rule_gets_stacks_and_its_changes_stay(way):
    seen = []

    def rule(own, shared, absent, kept, option):
        seen.append((own.shape, shared.shape, absent, option))
        kept.add_(1)
        return own * shared

    own = torch.arange(6.0).reshape(3, 2).requires_grad_()
    shared = torch.tensor([2.0, 3.0]).requires_grad_()
    kept = torch.zeros(3, 4)
    outputs = vmap(lambda own, kept: way(rule, (own, shared, None, kept), {"option": 1}))(own, kept)
    assert outputs.tolist() == [[0, 3], [4, 9], [8, 15]]
    assert seen == [((3, 2), (3, 2), None, {"option": 1})]
    assert kept.eq(1).all()
    gradients = torch.autograd.grad(outputs.sum(), [own, shared])
    assert gradients[0].tolist() == [[2, 3]] * 3
    assert gradients[1].tolist() == [6, 9]


def test_the_documented_way_does_not_lose_gradients_silently():
    shared = torch.ones(2, requires_grad=True)
    outputs = vmap(lambda own: own * step_out_documented(torch.square, (shared,)))(torch.ones(3))
    with pytest.raises(NotImplementedError):
        outputs.sum().backward()


@pytest.mark.parametrize("way", [private_torch.differs_between_clients, differs_documented])
def test_what_differs_between_clients(way):
    alone, told = torch.zeros(3), []
    vmap(lambda own: told.append((way(own), way(own[None] * 2), way(alone))) or own)(alone)
    assert told == [(True, True, False)]
    assert not way(alone)


@pytest.mark.parametrize(
    "text",
    [
        "sgd(weight_decay=0.1, momentum=0.9, nesterov=true)",
        "sgd(momentum=0.5)",
        "adam(weight_decay=0.1)",
        "adamw",
    ],
)
def test_optimisers_step_the_same_one_tensor_by_one(text, monkeypatch):
    def after_steps():
        generator = torch.Generator().manual_seed(0)
        optimiser = registered.make(text)
        parameters = {name: torch.randn(3, *shape, generator=generator) for name, shape in (("a", (2, 2)), ("b", ()))}
        state = optimiser.state(parameters)
        for _ in range(3):
            gradients = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in parameters.items()}
            optimiser.update_(parameters, gradients, state, 0.1)
        return parameters | state

    expected = after_steps()
    monkeypatch.setattr(optimisers, "for_each", ForEach(one_by_one))
    for name, tensor in after_steps().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_function_that_no_longer_asks_for_a_mode_is_not_opened():
    assert opened(F.relu6) is None, "it asks in another way"
    assert opened(lambda x: x) is None
    assert opened(torch.relu) is None


class Tied(nn.Module):
    """Two linear layers with one weight, around a norm layer that counts batches and another that has no buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm, self.plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False, track_running_stats=False)

    def forward(self, inputs):
        if not inputs.any():
            raise ArithmeticError("nothing but zeros")
        return self.second(self.plain(self.norm(self.first(inputs))))


def tensors_for(model):
    torch.manual_seed(1)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: torch.rand(tensor.shape).to(tensor.dtype) for name, tensor in named.items()}


def test_a_model_runs_on_tensors_in_the_place_of_its_own_in_both_ways():
    model, inputs = Tied(), torch.rand(4, 3)
    results = []
    for way in (calling_documented, CallingPrivately):
        state = tensors_for(model)
        results.append((way(model)(state, inputs), state))
    (expected, expected_state), (result, state) = results
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    assert state["norm.num_batches_tracked"].item() == 1


def test_a_model_has_its_own_tensors_again_after_a_call_also_after_one_that_fails():
    model = Tied()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    call = CallingPrivately(model)
    call(tensors_for(model), torch.rand(4, 3))
    with pytest.raises(ArithmeticError):
        call(tensors_for(model), torch.zeros(4, 3))
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[name] is tensor for name, tensor in before.items())
    assert model.second.weight is model.first.weight


def test_where_modules_keep_their_tensors_elsewhere_the_documented_call_is_taken(monkeypatch):
    monkeypatch.setattr(nn.Module, "named_modules", lambda self, *arguments, **options: iter(()))
    assert import_anew().calling.__name__ == "calling_documented"
