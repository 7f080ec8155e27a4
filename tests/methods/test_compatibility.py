"""Which parts can stand in one method, and what is said where they cannot."""

from __future__ import annotations

import pytest

from fedstrata.errors import FedStrataError
from fedstrata.methods import Method

ADAPTS = "each of them adds a final adaptation, and only one can"
GAPS = "each of them decides why a weight was not sent, and only one can"
HEADS = "each of them decides what becomes of the head, and only one can"
LOSS = "each of them decides the local loss, and only one can"
MIXES = "each of them mixes the clients' models anew for every client, and only one can"
PHASES = "each of them divides local training into phases, and only one can"
RECEIVES = "each of them puts a client's model together from what others sent, and only one can"
SETS = "each of them puts weights to values of its own, and only one can"
TRAVEL = "each of them decides which layers travel, and only one can"
USES = "each of them decides which model a client uses in the end, and only one can"


def without_sharing(part: str) -> str:
    return f"'local' shares nothing, and '{part}' works on what clients share"


def refusal(text: str) -> str:
    with pytest.raises(FedStrataError) as caught:
        Method.make(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "first", "second", "reason"),
    [
        ("local+lws", "local", "lws", without_sharing("lws")),
        ("lws+local", "lws", "local", without_sharing("lws")),
        ("local+ssfl", "local", "ssfl", without_sharing("ssfl")),
        ("local+fedavgm", "local", "fedavgm", without_sharing("fedavgm")),
        ("local+fedprox", "local", "fedprox", without_sharing("fedprox")),
        ("fedprox+local", "fedprox", "local", without_sharing("fedprox")),
        ("local+top-k", "local", "top-k", without_sharing("top-k")),
        ("local+player", "local", "player", TRAVEL),
        ("local+freeze-middle", "local", "freeze-middle", TRAVEL),
        ("player+freeze-middle", "player", "freeze-middle", TRAVEL),
        ("ssfl+transient", "ssfl", "transient", SETS),
        ("ssfl+lips", "ssfl", "transient", SETS),
        ("ssfl+freeze-middle", "ssfl", "freeze-middle", SETS),
        ("lips+freeze-middle", "transient", "freeze-middle", SETS),
    ],
)
def test_parts_that_would_undo_each_other_are_refused_by_name(text, first, second, reason):
    assert refusal(text) == f"'{first}' and '{second}' cannot be combined: {reason}. Leave one of them out."


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "d-psgd+lws",
            "'d-psgd' lets no client go on with the average of all, and 'lws' works on the average of all clients",
        ),
        (
            "fedavgm+d-psgd",
            "'d-psgd' lets no client go on with the average of all, and 'fedavgm' works on the average of all clients",
        ),
        ("pfedla+ssfl", "'ssfl' changes what travels, and 'pfedla' mixes clients' models as they are"),
        ("fedfomo+player", "'player' changes what travels, and 'fedfomo' mixes clients' models as they are"),
        (
            "fedfomo+fedadam",
            "'fedfomo' lets no client go on with the average of all, and 'fedadam' works on the average of all clients",
        ),
        ("d-psgd+dispfl", MIXES),
        ("d-psgd+sparse-ft", RECEIVES),
        ("fedcac+pfedla", MIXES),
        ("d-psgd+fedcac", MIXES),
        ("dispfl+transient", SETS),
        ("feddst+ssfl", SETS),
        ("local+d-psgd", without_sharing("d-psgd")),
        ("local+feddst", without_sharing("feddst")),
        (
            "freeze-middle+d-psgd",
            "'freeze-middle' changes what travels, and 'd-psgd' mixes clients' models as they are",
        ),
        ("fedcac+ssfl", "'ssfl' changes what travels, and 'fedcac' mixes clients' models as they are"),
    ],
)
def test_what_would_undo_a_mixture_is_refused(text, reason):
    assert f"cannot be combined: {reason}. Leave one of them out." in refusal(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fedper+fedrep", HEADS),
        ("fedper+fedbabu", HEADS),
        ("fedrep+fedrod", HEADS),
        ("fedbabu+fedavg-ft", USES),
        ("fedbabu+player", TRAVEL),
        ("fedrod+local-adaptation", USES),
        ("fedrod+fedir", LOSS),
        ("local+fedper", without_sharing("fedper")),
        ("ssfl+fedbabu", "'ssfl' masks weights of the head too, and 'fedbabu' leaves the head as it was initialised"),
        ("fedrod+fedpm", "'fedpm' does not train weights, and 'fedrod' works on the weights of the model"),
    ],
)
def test_what_would_undo_another_head_is_refused(text, reason):
    assert f"cannot be combined: {reason}. Leave one of them out." in refusal(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ditto+fedavg-ft", USES),
        ("ditto+pfedsd", USES),
        ("pfedme+local-adaptation", USES),
        ("ditto+fedrep", PHASES),
        ("local+ditto", without_sharing("ditto")),
        ("local+moon", without_sharing("moon")),
        ("local-adaptation+fedavg-ft", USES),
        ("d-psgd-ft+fedavg-ft", ADAPTS),
        (
            "pfedme+scaffold",
            "'pfedme' sends another model than the one in training, and 'scaffold' corrects the drift of the model in "
            "training",
        ),
    ],
)
def test_what_would_undo_a_model_of_ones_own_is_refused(text, reason):
    assert f"cannot be combined: {reason}. Leave one of them out." in refusal(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("random-k+ssfl", SETS),
        ("random-k+transient", SETS),
        ("subfedavg+random-k", SETS),
        ("sparsyfed+fedpm", SETS),
        ("top-k+fedlp", GAPS),
        ("subfedavg+top-k", GAPS),
        ("flash-spdst+fedlp", GAPS),
        ("sparsyfed+top-k", GAPS),
        ("fedpm+fedlp", GAPS),
        ("local+top-k", without_sharing("top-k")),
        ("local+fedbn", without_sharing("fedbn")),
        ("random-k+local", without_sharing("random-k")),
        (
            "subfedavg+player",
            "'player' leaves layers out of uploads, and 'subfedavg' needs every layer in every upload",
        ),
        (
            "fedlama+flash-jmwst",
            "'fedlama' leaves layers out of uploads, and 'flash-jmwst' needs every layer in every upload",
        ),
        ("fedpm+lws", "'fedpm' shares masks instead of weights, and 'lws' works on weights that clients share"),
        ("fedavgm+fedpm", "'fedpm' shares masks instead of weights, and 'fedavgm' works on weights that clients share"),
        ("sparsyfed+fedrod", "'sparsyfed' does not train weights, and 'fedrod' works on the weights of the model"),
    ],
)
def test_what_would_undo_a_mask_is_refused(text, reason):
    assert f"cannot be combined: {reason}. Leave one of them out." in refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "local+fedavg-ft",
        "fedbn+player+transient",
        "ssfl+player",
        "ssfl+fedbn+lws",
        "freeze-middle+fedbn+lws",
        "fedbn+lips+lws",
        "fedprox+fedavgm+lws",
        "fedcac+fedbn+lws",
        "d-psgd+fedprox",
        "pfedla+fedbn",
        "fedfomo+transient",
        "dispfl+fedbn",
        "fedrep+transient",
        "fedper+fedbn+lips",
        "fedper+scaffold",
        "fedbabu+lws",
        "fedrod+fedprox+fedbn",
        "ssfl+fedper",
        "ditto+fedbn+lips",
        "ditto+scaffold",
        "ditto+ssfl",
        "pfedme+fedbn+lws",
        "pfedme+transient",
        "pfedsd+fedbn",
        "random-k+fedbn+lws",
        "top-k+fedprox+fedavgm",
        "ssfl+top-k",
        "subfedavg+fedbn",
        "flash-spdst+player",
        "flash-jmwst+fedper",
        "sparsyfed+ditto",
        "sparsyfed+scaffold",
        "fedpm+fedbn",
    ],
)
def test_parts_that_fit_are_taken(text):
    assert str(Method.make(text)) == text
