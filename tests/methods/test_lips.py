from __future__ import annotations

import pytest
import torch
from watching import BOTH_ENGINES, assert_same_bits, run

from fedstrata.engines.engine import pack
from fedstrata.errors import FedStrataError
from fedstrata.methods import Method


@BOTH_ENGINES
def test_without_sparsity_it_is_fedbn(engine):
    left, right = run("lips(tau0=0, every=1)", engine), run("fedbn", engine)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    assert_same_bits(left.engine.clients().group("own"), right.engine.clients().group("own"))
    assert left.metrics.latest() == right.metrics.latest()


@BOTH_ENGINES
def test_the_name_stands_for_fedbn_and_transient(engine):
    assert Method.make("fedbn+lips").parts == Method.make("lips").parts == Method.make("fedbn+transient").parts
    left, right = run("fedbn+lips(every=1)", engine), run("lips(every=1)", engine)
    assert_same_bits(*(pack(one.engine.server, one.engine.clients()) for one in (left, right)))
    with pytest.raises(FedStrataError, match="'transient' twice with different parameters"):
        Method.make("lips(tau0=0.5)+transient")


@BOTH_ENGINES
def test_biases_are_shared_or_stay_at_each_client_with_the_classifiers(engine):
    """The paper keeps norm layers only; the released code shares weights only."""
    assert Method.make("lips(biases=local)").parts == Method.make("fedbn(biases=local)+transient").parts
    shared, local = (run(f"lips(every=1, biases={choice})", engine, rounds=2) for choice in ("shared", "local"))
    biases = {f"{layer}.bias" for layer in ("stem", "hidden", "head")}
    assert local.setting.personal - shared.setting.personal == biases
    assert shared.setting.personal == shared.setting.layers.norm_names
    own = local.engine.clients().group("own")
    for name in biases:
        assert name not in local.engine.server.model
        assert name in shared.engine.server.model
    for name in biases - {"stem.bias"}:  # whose norm takes it out again: it has no gradient
        assert len({tuple(row) for row in own[name].tolist()}) == 5, "each client has learned its own"
        assert not torch.equal(own[name][0], local.setting.initial[name])
