"""FedStrata as an ordinary Flower app: a ClientApp and a ServerApp.

The two factories can be used wherever Flower runs an app, in a deployment or in Flower's simulation::

    from fedstrata.deployment.flower import client_app, server_app

    server = server_app(sites=4)
    client = client_app(part_of_partition=True)

The configuration of Flower's run changes the experiment (``flwr run . --run-config 'method="fedbn" rounds=5'``), the
configuration of a node what is the site's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedstrata.callbacks import Listener, RoundView
from fedstrata.deployment.flower.grid import AskedNodes, GridNetwork
from fedstrata.deployment.flower.messages import from_record, to_record
from fedstrata.deployment.policy import read_rules
from fedstrata.deployment.protocol import ProtocolError, Reply, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.deployment.status import LOG_FILE, LogFile, StatusFile
from fedstrata.experiment import Experiment
from fedstrata.plugins import import_files, load_imports
from fedstrata.runs.preparing import Ingredients

PARTITION_KEY = "partition-id"


# The site's end -------------------------------------------------------------------------------------------------------


def client_app(
    root: str | Path = "sites",
    *,
    data: str | None = None,
    data_root: str | None = None,
    device: str = "auto",
    part_of_partition: bool = False,
    imports: Iterable[str | Path] = (),
    policy: str | Path | None = None,
    own: Mapping[str, str] | None = None,
    ingredients: Ingredients | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ClientApp:
    """Make a ClientApp that keeps its state in ``root``, apart for every run and site.

    Its samples are all those of ``data`` in ``data_root``, or with ``part_of_partition`` those that the experiment's
    partition gives to the node's ``partition-id``. The node's configuration may name another ``state`` folder,
    ``data``, ``data-root``, ``device`` and ``policy``; the configuration of the run, which is the server's, cannot.
    ``imports`` are the files with components that the site may use; of what a server imports, a site without the file
    runs nothing. ``policy`` is the file with what the site takes part in. ``own`` are texts for keys of the
    experiment in which only a site may set something, a path or leave to fetch, such as
    ``{"model": "vit(weights=/data/vit.safetensors)"}``.
    """
    import_files(map(Path, imports))
    sites: dict[int, Site] = {}

    def find(context: Context) -> Site:
        number, node = _partition(context), context.node_config
        if number not in sites:
            samples = SiteData(
                data=_text(node, "data", data),
                data_root=_text(node, "data-root", data_root),
                device=_text(node, "device", device) or device,
                part=number if part_of_partition else None,
                ingredients=ingredients or Ingredients(),
                own=own or {},
            )
            folder = Path(_text(node, "state", str(root)) or root)
            file = _text(node, "policy", None if policy is None else str(policy))
            rules, policy_hash = read_rules(None if file is None else Path(file))
            sites[number] = Site(folder / f"site-{number}", samples, log, number, rules)
            sites[number].audit.start(policy=policy_hash, rules=vars(rules))
        return sites[number]

    return app_of(find)


def _text(config: Mapping[str, Any], key: str, otherwise: str | None) -> str | None:
    return str(config[key]) if key in config else otherwise


def app_of(find: Callable[[Context], Site]) -> ClientApp:
    """Make a ClientApp that lets the site of a context answer every kind of message."""

    def handle(message: Message, context: Context) -> Message:
        return Message(answer(find(context), message.content), reply_to=message)

    app = ClientApp()
    for decorate in (app.train(), app.evaluate(), app.query()):
        decorate(handle)
    return app


def _partition(context: Context) -> int:
    return int(context.node_config.get(PARTITION_KEY, 0))


def answer(site: Site, content: RecordDict) -> RecordDict:
    """Let a site answer the content of a Flower message."""
    try:
        request = Request.read(*from_record(content))
    except ProtocolError as error:
        reply = Reply("", "refused", {"reason": str(error)})
    else:
        reply = site.answer(request)
    return to_record(reply.header(), reply.payload)


# The server's end -----------------------------------------------------------------------------------------------------


def server_app(
    experiment: Experiment | str | Path | None = None,
    sites: int = 2,
    out: str | Path | None = None,
    *,
    rules: Rules | None = None,
    rehearsal: bool = False,
    ingredients: Ingredients | None = None,
    listener: Listener | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ServerApp:
    """Make a ServerApp that runs an experiment over a number of nodes.

    Nodes are numbered by the ``partition-id`` of their configuration. The run folder is ``out``, by default one in
    ``runs`` with the number of Flower's run; where a run was begun there, it goes on. The configuration of Flower's run
    may change all of it (:func:`configured`).
    """
    place = Path() if experiment is None or isinstance(experiment, Experiment) else Path(experiment).parent
    if not isinstance(experiment, Experiment):
        experiment = Experiment() if experiment is None else Experiment.read(Path(experiment))
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        names = [f"site-{number}" for number in range(sites)]
        folder = Path(out or Path("runs") / f"flower-{context.run_id}")
        given = Deployment(experiment, names, folder, rules or Rules(), rehearsal, ingredients or Ingredients())
        deployment = configured(given, context.run_config)
        deployment = dataclasses.replace(deployment, experiment=load_imports(deployment.experiment, place))
        deployment.check()
        status = StatusFile.begin(deployment)
        tell = LogFile(deployment.out / LOG_FILE, log)
        tell(f"waits for {len(deployment.names)} nodes, with a partition-id from 0 to {len(deployment.names) - 1}")
        network = GridNetwork(grid, AskedNodes(grid, len(deployment.names)))
        progress = listener or (lambda update: tell(_progress(update)))
        deployment.run(network, progress, status, tell)

    return app


def _progress(update: RoundView) -> str:
    accuracy = update.metrics.get("client_after.accuracy.mean")
    reached = "" if accuracy is None else f", accuracy {accuracy:.1%} (mean over the sites)"
    return f"round {update.round} of {update.rounds}: loss {update.metrics['train.loss']:.4g}{reached}"


def configured(deployment: Deployment, config: Mapping[str, Any]) -> Deployment:
    """Change a deployment by the configuration of Flower's run.

    ``sites`` is the number of sites and ``out`` the run folder; other keys may be those of an experiment or of the
    rules, with ``-`` or ``_`` between words. Keys that are none of these belong to the app.
    """
    values = {key.replace("-", "_"): value for key, value in config.items()}
    experiment, rules = (
        {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}
        for kind in (Experiment, Rules)
    )
    return dataclasses.replace(
        deployment,
        experiment=deployment.experiment.with_changes(experiment),
        rules=dataclasses.replace(deployment.rules, **rules),
        names=[f"site-{number}" for number in range(int(values.get("sites", len(deployment.names))))],
        out=Path(values.get("out") or deployment.out),
    )
