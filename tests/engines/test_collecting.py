"""Replies that come one by one, in any order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.engines.collecting import RunningMean
from fedstrata.methods.contract.views import Message
from fedstrata.stack import weighted_mean


def test_a_running_mean_by_hand():
    """Weights 3 and 1; the second entry comes from one client only, the third from nobody."""
    mean = RunningMean()
    for values, kept, weight in (([1.0, 2.0, 0.0], [1, 1, 0], 3.0), ([5.0, 0.0, 0.0], [1, 0, 0], 1.0)):
        sent = {"a": torch.tensor([values]), "counter": torch.tensor([4])}
        mean.add(Message(sent, {"a": torch.tensor([kept]).bool()}), torch.tensor(weight, dtype=torch.float64))
    found = mean.mean({"a": torch.tensor([9.0, 9.0, 9.0]), "counter": torch.tensor(0), "not sent": torch.zeros(1)})
    assert found["a"].tolist() == [2.0, 2.0, 9.0]
    assert found["counter"].tolist() == 4
    assert found.keys() == {"a", "counter"}


@given(st.integers(0, 2**31), st.integers(1, 6), st.permutations(range(6)))
def test_a_running_mean_is_the_mean_of_all_in_any_order(seed, clients, order):
    chance = torch.Generator().manual_seed(seed)
    masks = torch.rand(clients, 7, generator=chance) < 0.7
    stack = torch.randn(clients, 7, generator=chance, dtype=torch.float64) * masks
    weights = torch.randint(1, 100, (clients,), generator=chance).double()
    otherwise = torch.randn(7, generator=chance, dtype=torch.float64)
    mean = RunningMean()
    for client in (client for client in order if client < clients):
        mean.add(Message({"a": stack[client : client + 1]}, {"a": masks[client : client + 1]}), weights[client])
    expected = weighted_mean(stack, weights / weights.sum(), masks, otherwise)
    torch.testing.assert_close(mean.mean({"a": otherwise})["a"], expected, rtol=0, atol=1e-13)
