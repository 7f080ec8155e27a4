"""FedStrata's own ways to do the work of ``peer_work.py``, and the process of one system: run by ``peers.py``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import peer_libraries
from peer_work import BATCH_SIZE, CLIENTS, EPOCHS, LEARNING_RATE, SAMPLES, LocalWork, Serve, plain, serve_on


def _fedstrata(engine: str, work: LocalWork, serve: Serve) -> None:
    import fedstrata  # noqa: F401 - sets the environment before torch is imported

    import torch  # isort: skip
    import numpy as np

    from fedstrata.data import Split, from_arrays
    from fedstrata.engines.planning import Plan
    from fedstrata.experiment import Experiment
    from fedstrata.runs.driver import Driver
    from fedstrata.runs.preparing import Ingredients

    inputs, labels = (tensor.flatten(0, 1) for tensor in work.tensors)
    dataset = from_arrays(inputs, labels, class_names=tuple("0123456789"), test_fraction=0.0)
    positions = np.arange(CLIENTS * SAMPLES).reshape(CLIENTS, SAMPLES)
    experiment = Experiment(
        method="fedavg",
        optimiser=f"sgd(learning_rate={LEARNING_RATE})",
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        transforms="none",
        rounds=10**6,
        device="cpu",
        engine=engine,
    )
    ingredients = Ingredients(
        dataset=dataset, split=Split(tuple(positions), tuple(positions[:, :0])), model=work.model()
    )
    plan = Plan(engine, 1 if engine == "loop" else CLIENTS, torch.get_num_threads())
    run = Driver.prepare(experiment, ingredients, plan).engine
    numbers = iter(range(1, 10**6))
    names = [name for name, _ in work.model().named_parameters()]
    serve(
        lambda: run.round(next(numbers), range(CLIENTS), evaluate=False),
        lambda: [run.server.model[name].numpy() for name in names],
    )


def stacked(work: LocalWork, serve: Serve) -> None:
    """Train all clients as one batch of models."""
    _fedstrata("stacked", work, serve)


def loop(work: LocalWork, serve: Serve) -> None:
    """Train one client after the other, with every message encoded, checked and decoded."""
    _fedstrata("loop", work, serve)


ADAPTERS: dict[str, Callable[[LocalWork, Serve], None]] = {
    "plain loop": plain,
    "FedStrata, stacked": stacked,
    "FedStrata, loop": loop,
    "FedJAX": peer_libraries.fedjax,
    "fluke": peer_libraries.fluke,
    "pfl-research": peer_libraries.pfl_research,
    "FedLab": peer_libraries.fedlab,
    "BlazeFL": peer_libraries.blazefl,
    "APPFL": peer_libraries.appfl,
    "PFLlib": peer_libraries.pfllib,
    "Flower, simulation": peer_libraries.flower,
}


def main() -> None:
    """Run one system on some cores: answer on what was the standard output, which the peers now cannot disturb."""
    system, model, cores = sys.argv[1:]
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        ADAPTERS[system](LocalWork(model), serve_on(channel))
    except ImportError as error:
        print(json.dumps({"missing": f"{error}"}), file=channel, flush=True)


if __name__ == "__main__":
    main()
