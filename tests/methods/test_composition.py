from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from watching import assert_same_bits, clients_view, declared, outlined, run, server_view, step_view, training_view

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import (
    Clients,
    Decision,
    Exchange,
    Facts,
    Kept,
    Message,
    Method,
    Needs,
    Part,
    Phase,
    Touches,
    methods,
)


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


# What a part says of itself ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Silent(Part):
    """Says nothing of what it touches."""

    name: ClassVar[str] = "silent"
    facts: ClassVar[Facts] = Facts("test", "none")


@dataclass(frozen=True)
class Harmless(Silent):
    """Says that it touches nothing."""

    name: ClassVar[str] = "harmless"
    touches: ClassVar[Touches] = Touches()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("local", "'local' shares nothing, and 'silent' does not say whether it works on what clients share"),
        ("fedpm", "'fedpm' does not train weights, and 'silent' does not say whether it works on the weights of the"),
        ("fedper", "'fedper' keeps the head at each client, and 'silent' does not say whether it works on a head that"),
    ],
)
def test_a_part_that_says_nothing_is_refused_where_something_is_taken_away(other, reason):
    taking = methods.make(other)
    for parts in ((Silent(), taking), (taking, Silent())):
        with pytest.raises(FedStrataError) as caught:
            Method("x", parts)
        assert reason in str(caught.value)
        assert "(declare its 'touches')" in str(caught.value)
    assert Method("x", (Harmless(), taking)).parts == (Harmless(), taking)
    assert Method("x", (Silent(), methods.make("fedprox"))).parts[0] == Silent()


def test_a_method_needs_what_its_parts_need():
    needs = Method.make("fedrod+fedavg").needs
    assert (needs.features, needs.previous, needs.replies, needs.mean_gradients) == (True, False, False, False)
    joined = Needs.join(
        [
            Needs(proxy=3, held_out=0.2, last_gradients=True, mean_gradients=True, operations={abs: max}),
            Needs(proxy=5, held_out=0.1, previous=True, replies=True, samples_per_epoch=7, operations={round: min}),
            Needs(relays=2),
            Needs(),
        ]
    )
    assert joined == Needs(
        proxy=5, held_out=0.2, last_gradients=True, mean_gradients=True, previous=True, replies=True,
        samples_per_epoch=7, relays=2, operations={abs: max, round: min},
    )  # fmt: skip


def test_a_part_that_says_nothing_needs_nothing():
    assert Needs() == Needs(
        features=False, last_gradients=False, mean_gradients=False, previous=False, learns=(), replies=False, relays=0,
        proxy=0, held_out=0.0, samples_per_epoch=None, operations={},
    )  # fmt: skip
    assert (Facts("family", "paper").link, Facts("family", "paper").not_on_network) == ("", None)


@pytest.mark.parametrize(
    ("text", "summing", "secure", "joining", "rounding", "personal", "by_mean"),
    [
        ("fedavg+fedprox", None, None, None, None, False, True),
        ("fedprox+top-k", None, "'top-k' lets each client send entries of its own", None, None, False, True),
        ("fedavgm+lws", *["'lws' looks at the replies of single clients"] * 2, None, None, False, True),
        ("l-dawa", *["'l-dawa' merges replies in a way of its own"] * 2, None, None, False, False),
        ("feddisco", *["'feddisco' weighs a client by who else takes part"] * 2, None, None, False, True),
        (
            "fedprox+d-psgd", *["'d-psgd' lets no client go on with the average of all"] * 2,
            "'d-psgd' counts the models of all clients from the first round on", None, True, True,
        ),
        (
            "fedprox+central-dp", None, None, None,
            "'central-dp' bounds the length of an update, beyond which rounding could carry it", False, True,
        ),
    ],
)  # fmt: skip
def test_what_a_method_can_run_under(text, summing, secure, joining, rounding, personal, by_mean):
    method = Method.make(text)
    assert (method.objection_to_summing, method.objection_to_secure_aggregation) == (summing, secure)
    assert (method.objection_to_joining, method.objection_to_rounding) == (joining, rounding)
    assert (method.personalises, method.merges_by_mean) == (personal, by_mean)


def test_the_part_that_needs_features_is_named_and_notes_are_collected():
    without_head = LayerMap.read(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), (1, 4, 4))
    with pytest.raises(FedStrataError, match="'moon' needs the inputs of a linear head"):
        Method.make("fedprox+moon").notes(outlined(without_head))

    class Noting(Harmless):
        def notes(self, outline):
            return [f"{outline.rounds} rounds", "too few"]

    method = Method("x", (methods.make("moon"), Noting()))
    assert method.notes(outlined(LINEAR, rounds=7)) == ["7 rounds", "too few"]


# Every hook ----------------------------------------------------------------------------------------------------------

LINEAR = LayerMap.read(nn.Linear(1, 1, bias=False), (1,))


class Asking(Exchange):
    """Asks once before every round, and twice when somebody joins."""

    def due(self, round, rounds, joining):
        return 2 if joining else int(round < rounds)

    def asks(self, server):
        return [int(server.memory["at_server"])]

    def survey(self, clients, model):
        return Message({"told": clients.memory["at_client"] + model["weight"].flatten()})

    def conclude(self, server, replies):
        return {"weight": replies.tensors["told"]}, {"at_server": server.memory["at_server"] + 1}

    def announce(self, server):
        return Message({"told": server.memory["at_server"][None]})

    def adopt(self, clients, announcement):
        return {"at_client": clients.memory["at_client"] + announcement.tensors["told"]}


@dataclass(frozen=True)
class Everything(Harmless):
    """Multiplies all that passes by its factor, after it added its memory; the memory grows by one each time."""

    factor: int = 2

    def _client(self, clients, tensors):
        own = clients.memory["at_client"]
        return {name: self.factor * (tensor + own) for name, tensor in tensors.items()}

    def _server(self, server, tensors):
        own = server.memory["at_server"]
        return {name: self.factor * (tensor + own) for name, tensor in tensors.items()}

    @staticmethod
    def _later(memory):
        return {name: tensor + 1 for name, tensor in memory.items()}

    def keeps(self, layers):
        return Kept(personal=["bias"], resident=[f"kept{self.factor}"])

    def initial(self, layers, model, seed):
        return {name: self.factor * tensor + seed for name, tensor in model.items()}

    def client_memory(self, clients, model):
        return {"at_client": torch.full((len(clients.ids),), float(self.factor))}

    def server_memory(self, server):
        return {"at_server": torch.tensor(float(self.factor))}

    def exchanges(self):
        return (Asking(),)

    def broadcast(self, server, message):
        return Message(self._server(server, message.tensors))

    def start(self, clients, message, model):
        return self._client(clients, model), self._later(clients.memory)

    def effective(self, clients, parameters, step):
        return self._client(clients, parameters)

    def loss(self, clients, step, loss):
        return self.factor * (loss + clients.memory["at_client"])

    def gradients(self, clients, step, gradients):
        return self._client(clients, gradients)

    def project(self, clients, step, parameters):
        same = clients.memory["at_client"]
        return self._client(clients, parameters), {"at_client": same, "new": same + 1}

    def finish(self, clients, training):
        return self._client(clients, training.trained), self._later(clients.memory)

    def upload(self, clients, training, message):
        return Message(self._client(clients, message.tensors))

    def deployed(self, clients, model):
        return self._client(clients, model)

    def refine(self, server, model, replies):
        return self._server(server, model), self._later(server.memory)

    def metrics(self, server):
        return {f"number{self.factor}": float(server.memory["at_server"])}

    def remarks(self, server):
        return [f"remark {self.factor} {int(server.memory['at_server'])}"]

    def masks_known(self, view, upload):
        return {f"mask{self.factor}": view.memory["at_client" if isinstance(view, Clients) else "at_server"]}


@dataclass(frozen=True)
class Further(Everything):
    """The same once more."""

    name: ClassVar[str] = "further"
    factor: int = 3


BOTH = Method("harmless+further", (Everything(), Further()))
REMEMBERED = {"harmless/at_client": torch.tensor([2.0]), "further/at_client": torch.tensor([3.0])}
AT_SERVER = {"harmless/at_server": torch.tensor(2.0), "further/at_server": torch.tensor(3.0)}
ONE = {"weight": torch.tensor([[[1.0]]])}
CLIENTS = clients_view(LINEAR, 1, memory=REMEMBERED)
SERVER = server_view(LINEAR, {"weight": torch.tensor([[1.0]])}, memory=AT_SERVER, participants=(0,), clients=2)
THROUGH_BOTH = 3 * (2 * (1 + 2) + 3)
"""What becomes of 1: plus 2, times 2, plus 3, times 3."""


def test_before_the_first_round_all_parts_are_asked():
    assert BOTH.personal(LINEAR) == {"bias"}
    assert BOTH.resident(LINEAR) == {"bias", "kept2", "kept3"}
    assert BOTH.initial(LINEAR, {"weight": torch.tensor([[1.0]])}, 5)["weight"].item() == 3 * (2 * 1 + 5) + 5
    assert BOTH.client_memory(CLIENTS, ONE) == REMEMBERED
    assert BOTH.server_memory(SERVER) == AT_SERVER


def test_hooks_at_clients_run_through_all_parts_each_with_its_own_memory():
    step, training = step_view(ONE), training_view(ONE, ONE)
    grown = {"harmless/at_client": torch.tensor([3.0]), "further/at_client": torch.tensor([4.0])}
    for model, memory in (BOTH.start(CLIENTS, Message(), ONE), BOTH.finish(CLIENTS, training)):
        assert model["weight"].item() == THROUGH_BOTH
        assert memory == grown
    model, changed = BOTH.project(CLIENTS, step, ONE)
    assert model["weight"].item() == THROUGH_BOTH
    assert changed == {"harmless/new": torch.tensor([3.0]), "further/new": torch.tensor([4.0])}
    for tensors in (
        BOTH.effective(CLIENTS, ONE, 0), BOTH.gradients(CLIENTS, step, ONE),
        BOTH.upload(CLIENTS, training, Message(ONE)).tensors,
    ):  # fmt: skip
        assert tensors["weight"].item() == THROUGH_BOTH
    assert BOTH.deployed(CLIENTS, ONE)["weight"].item() == 3 * (2 * (THROUGH_BOTH + 2) + 3)  # and the weights of it
    assert BOTH.loss(CLIENTS, step, torch.zeros(1)).item() == pytest.approx(3 * (2 * (0 + 2) + 3))
    assert BOTH.receive(CLIENTS, Message(), ONE) == (ONE, REMEMBERED)
    assert BOTH.masks_known(CLIENTS, upload=True) == {"mask2": torch.tensor([2.0]), "mask3": torch.tensor([3.0])}


def test_hooks_at_the_server_run_through_all_parts_each_with_its_own_memory():
    assert BOTH.broadcast(SERVER, Message(ONE)).tensors["weight"].item() == THROUGH_BOTH
    model, memory = BOTH.aggregate(server_view(LINEAR, {"weight": torch.tensor([[9.0]])}, memory=AT_SERVER), TWO_SENT)
    assert model["weight"].item() == 3 * (2 * (4.0 + 2) + 3)
    assert memory == {"harmless/at_server": torch.tensor(3.0), "further/at_server": torch.tensor(4.0)}
    assert BOTH.metrics(SERVER) == {"number2": 2.0, "number3": 3.0}
    assert BOTH.remarks(SERVER) == ["remark 2 2", "remark 3 3"]
    assert BOTH.masks_known(SERVER, upload=False) == {"mask2": torch.tensor(2.0), "mask3": torch.tensor(3.0)}


TWO_SENT = Message({"weight": torch.tensor([[[3.0]], [[5.0]]])})


def test_exchanges_belong_to_their_parts():
    assert [one.part.name for one in BOTH.exchanges_before(1, 3)] == ["harmless", "further"]
    assert BOTH.exchanges_before(3, 3) == []
    assert [one.part.name for one in BOTH.exchanges_before(3, 3, joining=True)] == ["harmless"] * 2 + ["further"] * 2
    one = BOTH.exchanges_before(1, 3)[1]
    assert one.asks(SERVER) == [3]
    assert one.survey(CLIENTS, ONE).tensors["told"].tolist() == [4.0]
    model, memory = one.conclude(SERVER, Message({"told": torch.tensor([4.0])}))
    assert model["weight"].tolist() == [4.0]
    assert memory == {"harmless/at_server": torch.tensor(2.0), "further/at_server": torch.tensor(4.0)}
    assert one.announce(SERVER).tensors["told"].tolist() == [3.0]
    assert one.adopt(CLIENTS, Message({"told": torch.tensor([3.0])})) == {
        "harmless/at_client": torch.tensor([2.0]), "further/at_client": torch.tensor([6.0])
    }  # fmt: skip
    assert list(Exchange.asks(one.exchange, SERVER)) == [0, 1]


@dataclass(frozen=True)
class Second(Harmless):
    """Trains a second model after the first, and a factor beside it."""

    name: ClassVar[str] = "second"

    @property
    def needs(self):
        return Needs(learns=("factor",))

    def phases(self, clients):
        return (Phase(name=f"{clients.memory['count'].item():.0f}"), Phase(model="own", before=self._begin))

    def _begin(self, clients, model):
        return {"weight": model["weight"] + 1}, {"count": clients.memory["count"] + 1}

    def loss(self, clients, step, loss):
        return loss + 100

    def adaptation(self):
        return Phase(epochs=4)

    def select(self, server, count):
        return (int(server.memory["chosen"]),)


def test_one_part_decides_on_phases_and_participants():
    method = Method("x", (Everything(), Second()))
    memory = {**CLIENTS.memory, "second/count": torch.tensor([7.0]), "second/factor/a": torch.tensor([1.0])}
    clients = clients_view(LINEAR, 1, memory=memory)
    first, second = method.phases(clients)
    assert (first.name, method.second_model(first), method.second_model(second)) == ("7", None, "second/own")
    assert method.before_phase(clients, first, ONE) == (ONE, memory)
    model, later = method.before_phase(clients, second, ONE)
    assert model["weight"].item() == 2.0
    assert later == {**memory, "second/count": torch.tensor([8.0])}
    assert method.learned(clients.memory) == ["second/factor/a"]
    assert BOTH.learned(clients.memory) == []
    assert method.adaptation == Phase(epochs=4)
    assert BOTH.adaptation is None
    chosen = server_view(LINEAR, {}, memory={"second/chosen": torch.tensor(1), "harmless/at_server": torch.tensor(0)})
    assert method.select(chosen, 1) == (1,)


def test_a_second_model_is_the_business_of_the_part_that_keeps_it():
    method = Method("x", (Everything(), Second()))
    plain, own = (step_view(ONE, phase=phase) for phase in (Phase(), Phase(model="own")))
    assert method.loss(CLIENTS, plain, torch.zeros(1)).item() == pytest.approx(2 * (0 + 2) + 100)
    assert method.loss(CLIENTS, own, torch.zeros(1)).item() == pytest.approx(100)
    assert method.gradients(CLIENTS, plain, ONE)["weight"].item() == 2 * (1 + 2)
    assert method.gradients(CLIENTS, own, ONE)["weight"].item() == 1


def test_participants_are_drawn_alike_for_every_method():
    drawn = [Method.make("fedavg").select(server_view(LINEAR, {}, round, clients=10), 3) for round in range(1, 400)]
    assert all(len(set(one)) == 3 and list(one) == sorted(one) for one in drawn)
    often = torch.tensor(drawn).flatten().bincount(minlength=10) / len(drawn)
    assert 0.22 < float(often.min()) < float(often.max()) < 0.38
    assert drawn == [BOTH.select(server_view(LINEAR, {}, round, clients=10), 3) for round in range(1, 400)]
    assert Method.make("fedavg").select(server_view(LINEAR, {}, clients=4), 4) == (0, 1, 2, 3)


def test_fedavg_weighs_by_size_and_leaves_what_it_does_not_know():
    method, model = Method.make("fedavg"), {"weight": torch.tensor([[9.0]])}
    server = server_view(LINEAR, model, sizes=torch.tensor([30, 10]))
    sent = Message({**TWO_SENT.tensors, "other": torch.zeros(2)})
    new, memory = method.aggregate(server, sent)
    assert {name: tensor.item() for name, tensor in new.items()} == {"weight": 0.75 * 3 + 0.25 * 5}
    assert memory == {}
    masked = Message(TWO_SENT.tensors, {"weight": torch.tensor([[[False]], [[True]]])})
    assert method.aggregate(server, masked)[0]["weight"].item() == 5.0


def test_without_a_part_that_changes_it_the_loss_is_the_experiments():
    step = step_view(ONE, outputs=torch.zeros(1, 3, 2), labels=torch.zeros(1, 3, dtype=torch.long))
    assert Method.make("fedavg").loss(CLIENTS, step, torch.tensor([0.25])).tolist() == [0.25]


def test_an_upload_may_be_the_same_for_all():
    class Sending(Harmless):
        def upload(self, clients, training, message):
            return Message({"weight": torch.ones(1, 1, 1)})

    sent = Method("x", (Sending(),)).upload(clients_view(LINEAR, 3), training_view(ONE, ONE), Message(ONE))
    assert sent.tensors["weight"].shape == (1, 1, 1)


def test_who_answers_for_privacy_changes_uploads_last():
    class Private(Harmless):
        touches: ClassVar[Touches] = Touches(decides=(Decision.PRIVACY,))

        def upload(self, clients, training, message):
            return Message({name: tensor + 1 for name, tensor in message.tensors.items()})

    class Doubling(Harmless):
        name: ClassVar[str] = "doubling"

        def upload(self, clients, training, message):
            return Message({name: 2 * tensor for name, tensor in message.tensors.items()})

    for parts in ((Private(), Doubling()), (Doubling(), Private())):
        sent = Method("x", parts).upload(CLIENTS, training_view(ONE, ONE), Message(ONE))
        assert sent.tensors["weight"].item() == 2 * 1 + 1


def test_a_part_probes_with_what_all_parts_remember():
    class Probing(Harmless):
        def start(self, clients, message, model):
            assert clients.memory.keys() == {"at_client"}
            return model, {"seen": torch.tensor([len(clients.probe)])}

    clients = clients_view(LINEAR, 1, memory=REMEMBERED, probing=lambda clients: clients.memory)
    _, memory = Method("x", (Probing(),)).start(clients, Message(), ONE)
    assert memory["harmless/seen"].item() == len(REMEMBERED)


def test_the_server_forgets_what_a_part_no_longer_returns():
    class Forgetting(Harmless):
        def refine(self, server, model, replies):
            return model, {}

    server = server_view(LINEAR, {"weight": torch.tensor([[9.0]])}, memory=AT_SERVER)
    assert Method("x", (Forgetting(),)).aggregate(server, TWO_SENT)[1].keys() == {"further/at_server"}


def test_shares_are_computed_in_double_precision():
    assert Method.make("fedavg").weigh(declared(30, 10)).dtype == torch.float64


# The order of parts --------------------------------------------------------------------------------------------------


def test_the_part_that_decides_the_loss_comes_before_those_that_add_to_it():
    left, right = (run(text, rounds=1).engine.server.model for text in ("fedprox(mu=5)+fedir", "fedir+fedprox(mu=5)"))
    assert_same_bits(left, right)
    alone = run("fedir", rounds=1).engine.server.model
    assert not torch.equal(alone["head.weight"], left["head.weight"])


@pytest.mark.parametrize(("early", "expected"), [(True, 1.0 + 2 * (6.0 - 1.0)), (False, 2 * (1.0 + 2 * (3.0 - 1.0)))])
def test_what_refines_the_merged_model_comes_before_the_servers_step(early, expected):
    """The merged weight is 3 and doubled; the server goes from 1 twice as far, before or after that."""

    class Doubling(Harmless):
        if early:
            refines_merged: ClassVar[bool] = True

        def refine(self, server, model, replies):
            assert replies == Message()
            return {name: 2 * tensor for name, tensor in model.items()}, server.memory

    method = Method("x", (methods.make("fedavgm(beta=0, learning_rate=2)"), Doubling()))
    layers = LayerMap.read(nn.Linear(1, 1, bias=False), (1,))
    first = server_view(layers, {"weight": torch.tensor([[1.0]])})
    server = server_view(layers, first.model, memory=method.server_memory(first))
    new, _ = method.advance(server, {"weight": torch.tensor([[3.0]])}, Message())
    assert new["weight"].item() == expected


def test_each_part_sees_its_own_memory_only():
    seen = []

    class Remembering(Harmless):
        def client_memory(self, clients, model):
            return {"count": torch.zeros_like(clients.sizes)}

        def server_memory(self, server):
            return {"count": torch.tensor(0)}

        def start(self, clients, message, model):
            seen.append(set(clients.memory))
            return model, {"count": clients.memory["count"] + 1}

        def refine(self, server, model, replies):
            seen.append(set(server.memory))
            return model, {"count": server.memory["count"] + 10}

    driver = run(Method("x", (methods.make("feddyn"), Remembering())), rounds=2)
    assert all(names == {"count"} for names in seen)
    assert driver.engine.clients()["memory/harmless/count"].tolist() == [2] * 5
    assert driver.engine.server.memory["harmless/count"] == 20


# Sentences -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fedagv", "There is no method 'fedagv'. Did you mean 'fedavg'?"),
        ("fedprox(nu=1)", "no parameter of the method 'fedprox' called 'nu'. Did you mean 'mu'?"),
        ("fedprox(mu=-1)", "-1.0 is outside what the parameter 'mu' of the method 'fedprox' takes: at least 0."),
        ("fedbn+", "'fedbn+' is not a method: a name is missing"),
        ("", "a name is missing"),
        ("fedprox(mu=1", "unmatched parenthesis"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(text, sentence):
    with pytest.raises(FedStrataError) as caught:
        Method.make(text)
    assert sentence in str(caught.value)
