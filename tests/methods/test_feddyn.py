from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    assert_same_bits,
    clients_view,
    memory_of,
    run,
    server_view,
    step_view,
    training_view,
    watched,
)

import fedstrata
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.runs.folder import RunFolder

LINE = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
NAME = "0.weight"


def stack(*rows: list[float]) -> dict[str, torch.Tensor]:
    return {NAME: torch.tensor([[row] for row in rows])}


def states(*rows: list[float], relative: tuple[float, ...] | None = None) -> dict[str, torch.Tensor]:
    """Make what clients remember: their states, and how large they are."""
    sizes = torch.tensor(relative or (1.0,) * len(rows), dtype=torch.float64)
    return {f"state/{NAME}": stack(*rows)[NAME], "relative": sizes}


# By hand -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("relative", "part"), [(1.0, 1.0), (2.0, 0.5)])
def test_the_loss_is_proximal_and_leans_along_the_state(relative, part):
    """At (2, 0) from (1, 1) the proximal term is .25 * 2, and <h, w> = .4 + 0; the gradient is .5 (w - w_t) - h.

    For a client of twice the mean size it is half of that, beside a loss that should count twice.
    """
    parameters = {NAME: torch.tensor([[[2.0, 0.0]]], requires_grad=True)}
    clients = clients_view(LINE, 1, memory=states([0.2, -0.4], relative=(relative,)))
    step, plain = step_view(parameters, stack([1.0, 1.0])), torch.tensor([3.0])
    loss = methods.make("feddyn(alpha=0.5)").loss(clients, step, plain)
    assert loss.dtype == torch.float32
    assert loss.tolist() == pytest.approx([3.0 + part * (0.5 - 0.4)])
    [slope] = torch.autograd.grad(loss.sum(), parameters[NAME])
    assert slope.flatten().tolist() == pytest.approx([part * (0.5 - 0.2), part * (-0.5 + 0.4)])


def test_the_clients_state_follows_its_way():
    clients = clients_view(LINE, 2, memory=states([0.2, -0.4], [0.0, 0.0], relative=(1.5, 0.5)))
    training = training_view(stack([1.0, 1.0], [1.0, 1.0]), stack([2.0, 0.0], [1.0, 3.0]))
    model, memory = methods.make("feddyn(alpha=0.5)").finish(clients, training)
    assert model is training.trained
    assert memory[f"state/{NAME}"].flatten().tolist() == pytest.approx([-0.3, 0.1, 0.0, -1.0])
    assert memory["relative"].tolist() == [1.5, 0.5]


@pytest.mark.parametrize(("text", "relative"), [("feddyn", [1.5, 0.5]), ("feddyn(scaled=false)", [1.0, 1.0])])
def test_a_client_learns_how_large_it_is(text, relative):
    """Of 30 and 10 samples, where the mean over all four is 20."""
    method, model = Method.make(text), {NAME: torch.tensor([[1.0, 1.0]])}
    everybody = server_view(LINE, model, sizes=torch.tensor([30, 10, 25, 15]), clients=4, participants=(0, 1, 2, 3))
    message = method.broadcast(server_view(LINE, model, memory=method.server_memory(everybody)), Message())
    clients = clients_view(LINE, 2, sizes=torch.tensor([30, 10]))
    memory = method.client_memory(clients, stack([1.0, 1.0], [1.0, 1.0]))
    assert memory["feddyn/relative"].tolist() == [1.0, 1.0]
    started = clients_view(LINE, 2, sizes=torch.tensor([30, 10]), memory=memory)
    _, memory = method.start(started, message, {})
    assert memory["feddyn/relative"].tolist() == relative
    assert memory[f"feddyn/state/{NAME}"].flatten().tolist() == [0.0] * 4


def two_rounds(text: str) -> tuple[list[float], list[list[float]], list[list[float]]]:
    """Let clients 0 and 1, then 0 and 2 of four take part: the server's states, its models, and what is tested."""
    method = Method.make(text)
    model = {NAME: torch.tensor([[1.0, 1.0]])}
    everybody = server_view(LINE, model, clients=4, participants=range(4), sizes=torch.tensor([30, 10, 20, 20]))
    memory, models, tested = method.server_memory(everybody), [], []
    for participants, sent in (((0, 1), ([2.0, 0.0], [4.0, 2.0])), ((0, 2), ([4.0, 1.0], [4.0, 3.0]))):
        view = server_view(LINE, model, memory=memory, clients=4, participants=participants)
        model, memory = method.aggregate(view, Message(stack(*sent)))
        models.append(model[NAME][0].tolist())
        view = server_view(LINE, model, memory=memory, clients=4, testing=True)
        tested.append(method.broadcast(view, Message({NAME: model[NAME][None]})).tensors[NAME].flatten().tolist())
    return memory[f"feddyn/state/{NAME}"].flatten().tolist(), models, tested


def test_the_server_corrects_the_mean_of_the_participants_by_the_mean_of_all():
    """Two of four took part: their mean is (3, 1) whatever their sizes, and h = -.5 * (2 / 4) * (2, 0)."""
    state, models, _ = two_rounds("feddyn(alpha=0.5)")
    assert models == [[4.0, 1.0], [5.0, 2.5]]
    assert state == [-0.5, -0.25]


@pytest.mark.parametrize(
    ("tested", "models"),
    [
        ("participants", [[3.0, 1.0], [4.0, 2.0]]),
        ("all", [[(2 + 4 + 1 + 1) / 4, (0 + 2 + 1 + 1) / 4], [(4 + 4 + 4 + 1) / 4, (1 + 2 + 3 + 1) / 4]]),
        ("cloud", [[4.0, 1.0], [5.0, 2.5]]),
    ],
)
def test_what_is_tested_is_a_mean_of_clients_and_what_is_trained_the_cloud_model(tested, models):
    assert two_rounds(f"feddyn(alpha=0.5, tested={tested})")[2] == models


def test_in_training_the_cloud_model_is_sent():
    method, model = Method.make("feddyn"), {NAME: torch.tensor([[1.0, 1.0]])}
    memory = {**method.server_memory(server_view(LINE, model)), f"feddyn/tested/{NAME}": torch.tensor([[7.0, 7.0]])}
    message = method.broadcast(server_view(LINE, model, memory=memory), Message({NAME: model[NAME][None]}))
    assert message.tensors[NAME].flatten().tolist() == [1.0, 1.0]


def test_entries_that_a_client_did_not_send_are_the_servers_in_the_mean_of_all():
    method, model = Method.make("feddyn(tested=all)"), {NAME: torch.tensor([[1.0, 1.0]])}
    view = server_view(LINE, model, memory=method.server_memory(server_view(LINE, model)))
    replies = Message(stack([3.0, 0.0], [5.0, 0.0]), {NAME: torch.tensor([[[True, False]]])})
    _, memory = method.aggregate(view, replies)
    assert memory[f"feddyn/tested/{NAME}"].tolist() == [[4.0, 1.0]]


# In a federation -----------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_the_servers_state_is_the_mean_of_all_clients_states(engine):
    simulation = run("feddyn(alpha=0.1)", engine, rounds=4, participation=0.6)
    memory, server = memory_of(simulation, "feddyn", "state"), simulation.engine.server.memory.group("feddyn/state")
    assert memory.keys() == server.keys() == set(simulation.setting.layers.parameter_names)
    for name, own in memory.items():
        assert torch.allclose(own.mean(0), server[name], rtol=0, atol=1e-12)
        if name != "stem.bias":  # in front of a norm a bias has no gradient
            assert float(own.abs().max()) > 1e-5


@BOTH_ENGINES
def test_the_mean_of_the_participants_is_tested_and_saved(engine):
    """Scores and the final model are those of plain means; the next round starts from the cloud model."""
    method, seen = watched("feddyn(scaled=false)")
    simulation = run(method, engine, rounds=2)
    for name in simulation.setting.layers.parameter_names:
        mean = torch.stack([seen.trained[2, client][name] for client in range(5)]).mean(0)
        assert torch.allclose(simulation.model[name], mean, rtol=0, atol=1e-12)
    assert not torch.allclose(simulation.model["head.weight"], simulation.engine.server.model["head.weight"])
    # In the first round the states are zero, so that clients do the same whatever is tested in the end.
    scores = [
        run(f"feddyn(scaled=false, tested={tested})", engine, rounds=1).metrics.latest()["global.loss"]
        for tested in ("participants", "all", "cloud")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-12)
    assert abs(scores[0] - scores[2]) > 1e-3


def test_clients_are_regularised_by_their_sizes():
    """A client smaller than the mean is held more: its way is shorter than without the scaling, that of a large one
    longer.
    """
    (scaled, one), (plain, other) = watched("feddyn(alpha=1)"), watched("feddyn(alpha=1, scaled=false)")
    sizes = run(scaled, rounds=1, epochs=2).split.sizes
    run(plain, rounds=1, epochs=2)
    for client, size in enumerate(sizes):
        ways = [
            float((seen.trained[1, client]["head.weight"] - seen.received[1, client]["head.weight"]).norm())
            for seen in (one, other)
        ]
        if size != sizes.mean():
            assert (ways[0] < ways[1]) == (size < sizes.mean())


def test_it_goes_further_than_the_mean_and_sends_one_number_more():
    feddyn, fedavg = run("feddyn", rounds=1), run("fedavg", rounds=1)
    initial = fedavg.setting.initial["head.weight"]
    further, plain = (float((one.engine.server.model["head.weight"] - initial).norm()) for one in (feddyn, fedavg))
    assert further > 1.5 * plain  # in the first round the correction adds the mean update once more
    assert feddyn.metrics.latest()["bytes.up"] == fedavg.metrics.latest()["bytes.up"]
    more = feddyn.metrics.latest()["bytes.down"] - fedavg.metrics.latest()["bytes.down"]
    assert 0 < more < 5 * 100
    as_written = run("feddyn(scaled=false)", rounds=1).metrics.latest()
    assert as_written["bytes.down"] == fedavg.metrics.latest()["bytes.down"]


def test_with_shrinking_the_corrected_model_shrinks():
    left, right = run("feddyn+lws(beta=5)", rounds=1).engine.server.model, run("feddyn", rounds=1).engine.server.model
    assert float(left["head.weight"].norm()) < float(right["head.weight"].norm())
    assert torch.equal(left["scale.running_var"], right["scale.running_var"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "feddyn+player",
            "'player' decides which layers travel, and 'feddyn' needs all shared layers of all participants",
        ),
        ("fedlama+feddyn", "'fedlama' decides which layers travel, and 'feddyn' needs all shared layers of all part"),
        ("feddyn+scaffold", "each of them decides the shares of the clients"),
        ("feddyn+feddisco", "each of them decides the shares of the clients"),
        ("feddyn+fednova", "'feddyn' pulls every step back to the model received, and 'fednova' counts the gradients"),
        ("feddyn+fedavgm", "each of them decides the server's step"),
        ("local+feddyn", "'local' shares nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(text, sentence):
    with pytest.raises(FedStrataError, match=sentence):
        Method.make(text)


def test_the_saved_model_is_the_tested_one(tmp_path):
    experiment = Experiment(
        clients=3, rounds=1, epochs=1, model="mlp", method="feddyn", engine="loop", device="cpu", partition="iid",
        batch_size=256,
    )  # fmt: skip
    result = fedstrata.run(experiment, out=tmp_path / "run")
    plain = fedstrata.run(experiment, method="fedavg")
    saved = RunFolder.open(tmp_path / "run").model()
    assert_same_bits(saved, result.model)
    for name, tensor in plain.model.items():  # the first round is that of FedAvg but for a weak proximal term
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-3)


@pytest.mark.parametrize("text", ["alpha=0", "tested=mean"])
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("=")[0]):
        methods.make(f"feddyn({text})")


def test_the_authors_defaults():
    assert asdict(methods.make("feddyn")) == {"alpha": 0.01, "tested": "participants", "scaled": True}


@pytest.mark.parametrize(("tested", "replies"), [("participants", False), ("all", True), ("cloud", False)])
def test_only_for_the_mean_of_all_the_server_looks_at_single_replies_and_keeps_models(tested, replies):
    method, model = Method.make(f"feddyn(tested={tested})"), {NAME: torch.tensor([[1.0, 1.0]])}
    assert method.needs.replies == replies
    assert (method.objection_to_summing is not None) == replies
    memory = method.server_memory(server_view(LINE, model))
    assert bool(memory.group("feddyn/last")) == replies


def test_before_the_first_round_the_initial_model_is_tested():
    method, model = Method.make("feddyn"), {NAME: torch.tensor([[1.0, 2.0]])}
    memory = method.server_memory(server_view(LINE, model))
    message = method.broadcast(server_view(LINE, model, memory=memory, testing=True), Message())
    assert message.tensors[NAME].flatten().tolist() == [1.0, 2.0]


def test_all_parameters_lean_along_their_states():
    """<h, w> over two tensors is 2 * .5 + 3 * 1; nothing has moved, so there is no proximal term."""
    two = LayerMap.read(nn.Sequential(nn.Linear(1, 1)), (1,))
    parameters = {"0.weight": torch.tensor([[[2.0]]]), "0.bias": torch.tensor([[3.0]])}
    memory = {"state/0.weight": torch.tensor([[[0.5]]]), "state/0.bias": torch.tensor([[1.0]])}
    clients = clients_view(two, 1, memory={**memory, "relative": torch.ones(1, dtype=torch.float64)})
    loss = methods.make("feddyn").loss(clients, step_view(parameters, parameters), torch.tensor([10.0]))
    assert loss.tolist() == [6.0]
