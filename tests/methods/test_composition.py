from __future__ import annotations

import pytest

from fedstrata.errors import FedStrataError
from fedstrata.methods import Method, methods


def test_parts_keep_their_order_and_parameters():
    assert str(Method.make("fedbn + fedprox(mu=0.5)")) == "fedbn+fedprox(mu=0.5)"
    assert [part.name for part in Method.make("fedbn+fedprox").parts] == ["fedbn", "fedprox"]


def test_a_part_that_stands_twice_counts_once():
    assert Method.make("fedbn+fedprox+fedbn").parts == Method.make("fedbn+fedprox").parts


def test_a_part_that_stands_twice_with_other_parameters_is_refused():
    with pytest.raises(
        FedStrataError, match=r"'fedprox' twice with different parameters: fedprox\(mu=0.1\) and fedprox\(mu=0.2\)"
    ):
        Method.make("fedprox(mu=0.1)+fedprox(mu=0.2)")


def test_two_owners_of_one_decision_are_refused_by_name():
    class Other(type(methods.make("fedavgm"))):
        pass

    Other.name = "other"
    with pytest.raises(
        FedStrataError, match="'fedavgm' and 'other' cannot be combined: each of them decides the server's step"
    ):
        Method("x", (methods.make("fedavgm"), Other()))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fedagv", "There is no method 'fedagv'. Did you mean 'fedavg'?"),
        ("fedprox(nu=1)", "no parameter of the method 'fedprox' called 'nu'. Did you mean 'mu'?"),
        ("fedprox(mu=-1)", "-1.0 is outside what the parameter 'mu' of the method 'fedprox' takes: at least 0."),
        ("fedbn+", "a name is missing"),
        ("", "a name is missing"),
        ("fedprox(mu=1", "unmatched parenthesis"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(text, sentence):
    with pytest.raises(FedStrataError) as caught:
        Method.make(text)
    assert sentence in str(caught.value)
