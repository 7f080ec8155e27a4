"""Which engine, and how many clients at once: found by trying, not by guessing."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from fedstrata.engines.batches import DeviceData
from fedstrata.engines.client import ClientSide
from fedstrata.engines.engine import Engine
from fedstrata.engines.forward import Forward, LoopForward, StackedForward
from fedstrata.engines.loop import LoopClient, LoopEngine, LoopServer
from fedstrata.engines.server import ServerSide
from fedstrata.engines.setting import Setting
from fedstrata.engines.stacked import StackedEngine
from fedstrata.engines.threads import SideBySide
from fedstrata.engines.trying import Candidate, Round, fastest, fastest_tried, try_alone
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.methods import Declared
from fedstrata.stack import repeat

ENGINES = ("loop", "stacked")
"""The engines that a simulation runs on."""
_THREADS = torch.get_num_threads()
_ROUNDS_TO_LEARN = 4
"""In so many rounds steps of every kind are replayed, if they ever are: two are compared, and one is seen before."""
_LONG_SECONDS = 0.5
"""A trial that takes so long computes nearly all the time, and is as long with steps in Python."""


def threads_of_this_process() -> int:
    """Tell how many threads PyTorch takes here, unless a plan says otherwise."""
    return _THREADS


@dataclass(frozen=True)
class Plan:
    """What was decided: the engine, the number of clients at once, and the threads (none: as many as PyTorch takes).

    The loop takes its clients at once in threads of their own, each with so many of PyTorch's.
    """

    engine: str
    chunk: int
    threads: int | None = None

    def is_like(self, other: Plan) -> bool:
        """Whether both take the same way, whatever number of clients fits at once: that follows from the memory."""
        return (self.engine, self.threads) == (other.engine, other.threads)

    def set_threads(self) -> None:
        """Let PyTorch use the threads that were decided on."""
        torch.set_num_threads(self.threads or _THREADS)


@dataclass(frozen=True)
class SharedMemory:
    """The memory for clients on a device that several runs share.

    ``free`` is what there was before the first of them began, by which all plan, as each would alone; ``take`` waits
    until the others leave as much as a run is going to need.
    """

    free: float
    take: Callable[[float], None]


def make_plan(
    asked: str,
    chunk: int | None,
    setting: Setting,
    model: nn.Module,
    data: DeviceData,
    declared: Declared,
    free: float | None = None,
    participants: int | None = None,
    like: Plan | None = None,
) -> Plan:
    """Decide how to run: as asked if possible, else what is faster here, with so many participants a round (none: all).

    A model that cannot be stacked is looped over, with a warning that names the module. ``free`` is the memory for
    clients, where it is not to be measured. Where it is possible, it is decided ``like`` for another run beside which
    this one is to stand: engines, and numbers of threads, differ in last bits, of which training makes more.
    """
    plans = _possible(asked, chunk, setting, model, data, free)
    plans = [plan for plan in plans if like is not None and plan.is_like(like)] or plans
    if len(plans) == 1:
        return plans[0]
    candidates = _candidates(plans, setting, model, data, declared, participants)
    return fastest(candidates, setting.work, data.split.sizes, participants or setting.clients, setting.rounds)


def timed_plan(
    asked: str,
    chunk: int | None,
    setting: Setting,
    model: nn.Module,
    data: DeviceData,
    declared: Declared,
    participants: int,
) -> Candidate[Plan]:
    """Decide as :func:`make_plan` does, and tell by short trials how long a round takes: ``round_seconds`` of it."""
    plans, sizes = _possible(asked, chunk, setting, model, data), data.split.sizes
    candidates = _candidates(plans, setting, model, data, declared, participants)
    if len(candidates) == 1:
        return try_alone(candidates[0], setting.work, sizes)
    return fastest_tried(candidates, setting.work, sizes, participants, setting.rounds)


def _possible(
    asked: str, chunk: int | None, setting: Setting, model: nn.Module, data: DeviceData, free: float | None = None
) -> list[Plan]:
    """List the plans among which the fastest is to be found; one where there is no choice."""
    if asked == "loop":
        return [Plan("loop", 1)]
    obstacle = stacking_obstacle(setting, model, data)
    if obstacle is not None:
        warnings.warn(f"The clients are trained one by one: {obstacle}.", FedStrataWarning, stacklevel=3)
        return [Plan("loop", 1)]
    at_once = min(chunk or clients_that_fit(setting, model, data, free), setting.clients)
    if asked == "stacked" or setting.device.type == "cuda":
        return [Plan("stacked", at_once)]
    # The first two are tried in any case, the others where steps are short enough: of large models, a client on each
    # core is the best of the loops. On a small model or a busy machine, one thread may be far faster than all.
    plans = [Plan("stacked", at_once, 1), Plan("loop", _THREADS, 1)]
    if _THREADS > 1:
        plans += [Plan("stacked", at_once, _THREADS), Plan("loop", 1, 1), Plan("loop", 1, _THREADS)]
    return plans


def _candidates(
    plans: Sequence[Plan],
    setting: Setting,
    model: nn.Module,
    data: DeviceData,
    declared: Declared,
    participants: int | None,
) -> list[Candidate[Plan]]:
    present = participants or setting.clients
    prepared = {(plan.engine, plan.chunk): cache(_short_rounds(plan, setting, model, data, declared)) for plan in plans}

    def with_threads(plan: Plan) -> Callable[[Sequence[int], int], Round]:
        def prepare(ids: Sequence[int], steps: int) -> Round:
            plan.set_threads()
            shared = prepared[plan.engine, plan.chunk](tuple(ids), steps)

            def one_round() -> None:
                plan.set_threads()
                shared()

            return one_round

        return prepare

    firsts: dict[tuple[str, int], Candidate[Plan]] = {}
    candidates = []
    for plan in plans:
        same = (plan.engine, plan.chunk)
        candidate = Candidate(plan, min(plan.chunk, present), with_threads(plan), like=firsts.get(same))
        firsts.setdefault(same, candidate)
        candidates.append(candidate)
    return candidates


def build_engine(plan: Plan, setting: Setting, model: nn.Module, data: DeviceData, declared: Declared) -> Engine:
    """Build the engine that was decided on."""
    if plan.engine == "loop":
        return LoopEngine(setting, model, data, declared, plan.chunk)
    return StackedEngine(setting, model, data, declared, plan.chunk)


def stacking_obstacle(setting: Setting, model: nn.Module, data: DeviceData) -> str | None:
    """Try one stacked step of two clients; say in words what prevents it, if something does."""
    inside: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda module, inputs: inside.append(name)

    def leave(module: nn.Module, inputs: object, outputs: object) -> None:
        inside.pop()

    handles = [module.register_forward_pre_hook(enter(name)) for name, module in model.named_modules()]
    handles += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        _trial_step(setting, StackedForward(model), data, clients=2, samples=2)
    except FedStrataError:
        raise
    except Exception as error:
        where = f"the module '{inside[-1] or type(model).__name__}'" if inside else "the model's backward pass"
        kind = f" ({type(model.get_submodule(inside[-1])).__name__})" if inside else ""
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        return f"{where}{kind} cannot run for many clients at once ({reason})"
    finally:
        for handle in handles:
            handle.remove()
    return None


def clients_that_fit(setting: Setting, model: nn.Module, data: DeviceData, free: float | None = None) -> int:
    """Estimate how many clients fit the free memory, which is measured if it is not given."""
    each = _memory_of_a_client(setting, StackedForward(model), data)
    return max(1, int((free_memory(setting.device) if free is None else free) // each))


def memory_of(plan: Plan, participants: int, setting: Setting, model: nn.Module, data: DeviceData) -> float:
    """Estimate the bytes that the clients take which are trained at once, of those that take part in a round."""
    forward = LoopForward(model) if plan.engine == "loop" else StackedForward(model)
    return min(plan.chunk, participants) * _memory_of_a_client(setting, forward, data)


def _memory_of_a_client(setting: Setting, forward: Forward, data: DeviceData) -> float:
    """Estimate the bytes that training takes for each client, from what a step keeps for its backward pass."""
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    samples = min(setting.work.batch_size, int(data.split.sizes.max()))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        _trial_step(setting, forward, data, clients=1, samples=samples)
    weights = sum(tensor.nbytes for tensor in setting.initial.values())
    # Beside what the backward pass needs: temporary results about as large, and weights, gradients, momentum, uploads.
    # The models of others that a client is sent are held twice while they are mixed. Steps that are replayed have
    # places of their own for weights, momentum and what a part remembers.
    places = 2 if setting.replay else 0
    return max(2 * sum(kept.values()) + (6 + places + 2 * setting.method.needs.relays) * weights, 1)


def free_memory(device: torch.device) -> float:
    """Measure how many bytes there are for the clients of a run; the rest is for data, messages and other programs."""
    if device.type == "cuda":
        return 0.7 * torch.cuda.mem_get_info(device)[0]
    known = "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {})
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if known else 2**32
    return min(0.4 * available, 4 * 2**30)


def _trial_step(setting: Setting, forward: Forward, data: DeviceData, clients: int, samples: int) -> None:
    """Run one training pass, forward and back, on the first samples of the pool; nothing is kept."""
    parameters = {
        name: tensor.detach().clone().requires_grad_() for name, tensor in repeat(_parameters(setting), clients).items()
    }
    buffers = repeat({name: setting.initial[name] for name in setting.layers.buffer_names}, clients)
    positions = torch.arange(samples, device=setting.device).remainder(len(data.labels)).expand(clients, samples)
    inputs, labels = data.make(positions, None, clients=[0] * clients)
    keys = torch.zeros(clients, 2, dtype=torch.int64, device=setting.device)
    with torch.autocast(setting.device.type, dtype=torch.bfloat16, enabled=setting.precision == "bf16"):
        outputs, _ = forward(parameters, buffers, inputs, keys, training=True)
    outputs = outputs.to(data.dtype)
    counts = torch.ones(clients, outputs.shape[-1], device=setting.device)
    loss = setting.loss(outputs, labels, counts).sum()
    torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)


def _parameters(setting: Setting) -> dict[str, Tensor]:
    return {name: setting.initial[name] for name in setting.layers.parameter_names}


def _short_rounds(
    plan: Plan, setting: Setting, model: nn.Module, data: DeviceData, declared: Declared
) -> Callable[[tuple[int, ...], int], Round]:
    """Make what tries a plan, whatever its threads: a round of some clients with a few steps each, without a trace.

    It is given when its steps are replayed, as they are in nearly all rounds of a run.
    """

    def prepare(ids: tuple[int, ...], steps: int) -> Round:
        brief = replace(setting, work=replace(setting.work, steps=steps))
        server = LoopServer(ServerSide(brief, declared))
        if plan.engine == "stacked":
            side = ClientSide(brief, StackedForward(model, head=setting.head), data)
            state, message = side.first_state(ids), server.side.broadcast(server.state, ids, 1)
            return _learned(_to_its_end(setting, lambda: side.round(ids, state, message, 1)), [side])
        side = ClientSide(brief, LoopForward(model, setting.head), data)
        sides, clients = SideBySide(side, plan.chunk), [LoopClient(side, client) for client in ids]
        asked = list(zip(clients, server.messages(ids, 1), strict=True))
        at_first = [client.state for client in clients]

        def answer(side: ClientSide, asked: tuple[LoopClient, bytes]) -> bytes:
            client, message = asked
            return client.answer(message, 1, side=side)[0]

        def one_round() -> None:
            for one, state in zip(clients, at_first, strict=True):
                one.state = state  # as the messages have it, which are always those of the first round
            for client, reply in zip(ids, sides.map(answer, asked), strict=True):
                server.decoded(reply, client, 1)

        return _learned(_to_its_end(setting, one_round), sides.sides)

    return prepare


def _learned(one_round: Round, sides: Sequence[ClientSide]) -> Round:
    """Run a round until nothing is left to do that is done once for a kind of step, or until that would not show."""
    for _ in range(_ROUNDS_TO_LEARN):
        began = time.perf_counter()
        one_round()
        if time.perf_counter() - began > _LONG_SECONDS or not any(side.trainer.learning for side in sides):
            break
    return one_round


def _to_its_end(setting: Setting, one_round: Round) -> Round:
    """Do a round to its end: on a GPU, what was begun is waited for."""

    def whole_round() -> None:
        one_round()
        if setting.device.type == "cuda":
            torch.cuda.synchronize(setting.device)

    return whole_round
