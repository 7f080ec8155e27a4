"""FedStrata as an ordinary Flower app: a ServerApp and a ClientApp, and their messages.

The two factories can be used wherever Flower runs an app, in a deployment or in Flower's simulation::

    from fedstrata.engines.flower import client_app, server_app

    server = server_app(sites=4)
    client = client_app(part_of_partition=True)

The configuration of Flower's run changes the experiment (``flwr run . --run-config 'method="fedbn" rounds=5'``), the
configuration of a node what is the site's own.

A request or a reply of :mod:`fedstrata.deployment.protocol` travels as a Flower message with two records: the facts as
a text, and the encoded bytes as an array with a serialisation type of its own, which Flower carries untouched.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.deployment.federation import Event
from fedstrata.deployment.protocol import ProtocolError, Reply, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import LOG_FILE, Deployment, LogFile, StatusFile
from fedstrata.deployment.site import Site, SiteData
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.plugins import import_files, load_imports
from fedstrata.runs.driver import Listener, Update
from fedstrata.runs.preparing import Ingredients

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

STYPE = "fedstrata.wire"
PARTITION_KEY = "partition-id"
_FACTS, _PAYLOAD = "fedstrata.facts", "fedstrata.payload"
_TYPES = {"survey": "train", "train": "train", "test": "evaluate", "adapt": "evaluate"}
_SECONDS_TO_LIVE = 12 * 3600.0
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""What keeps Flower from calling home and from fetching packages; set before it is imported."""


def need_flower() -> None:
    """Make sure that Flower is there, and keep it quiet; without it, name the extra that brings it."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import flwr.app  # noqa: F401
    except ImportError:
        raise FedStrataError(
            "Running on real sites needs Flower; install it with: pip install 'fedstrata[flower]'"
        ) from None


# Messages -------------------------------------------------------------------------------------------------------------


def to_record(header: str, payload: bytes) -> RecordDict:
    """Put facts and payload into the content of a Flower message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    records: dict[str, Any] = {_FACTS: ConfigRecord({"json": header})}
    if payload:
        records[_PAYLOAD] = ArrayRecord({"bytes": Array("uint8", (len(payload),), STYPE, payload)})
    return RecordDict(records)


def from_record(content: RecordDict) -> tuple[str, bytes]:
    """Take facts and payload out of the content of a Flower message; whatever does not fit is refused."""
    facts = content.config_records.get(_FACTS)
    header = None if facts is None else facts.get("json")
    if not isinstance(header, str):
        raise ProtocolError("A message came that FedStrata did not send: it holds no facts.")
    record = content.array_records.get(_PAYLOAD)
    if record is None:
        return header, b""
    array = record.get("bytes")
    if array is None or len(record) != 1 or array.stype != STYPE:
        raise ProtocolError("A message came that FedStrata did not send: its payload is of another kind.")
    return header, bytes(array.data)


# The site's end -------------------------------------------------------------------------------------------------------


def client_app(
    root: str | Path = "sites",
    *,
    data: str | None = None,
    data_root: str | None = None,
    device: str = "auto",
    part_of_partition: bool = False,
    imports: Iterable[str | Path] = (),
    ingredients: Ingredients | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> ClientApp:
    """Make a ClientApp that keeps its state in ``root``, apart for every run and site.

    Its samples are all those of ``data`` in ``data_root``, or with ``part_of_partition`` those that the experiment's
    partition gives to the node's ``partition-id``. The node's configuration may name another ``state`` folder,
    ``data``, ``data-root`` and ``device``; the configuration of the run, which is the server's, cannot. ``imports`` are
    the files with components that the site may use; of what a server imports, a site without the file runs nothing.
    """
    import_files(map(Path, imports))
    sites: dict[int, Site] = {}

    def find(context: Context) -> Site:
        number, node = _partition(context), context.node_config
        if number not in sites:
            own = SiteData(
                data=_text(node, "data", data),
                data_root=_text(node, "data-root", data_root),
                device=_text(node, "device", device) or device,
                part=number if part_of_partition else None,
                ingredients=ingredients or Ingredients(),
            )
            folder = Path(_text(node, "state", str(root)) or root)
            sites[number] = Site(folder / f"site-{number}", own, log, number)
        return sites[number]

    return app_of(find)


def _text(config: Mapping[str, Any], key: str, otherwise: str | None) -> str | None:
    return str(config[key]) if key in config else otherwise


def app_of(find: Callable[[Context], Site]) -> ClientApp:
    """Make a ClientApp that lets the site of a context answer every kind of message."""
    need_flower()
    from flwr.app import Message
    from flwr.clientapp import ClientApp

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
    need_flower()
    from flwr.serverapp import ServerApp

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
        tell = LogFile(deployment.out / LOG_FILE, log)
        tell(f"waits for {len(deployment.names)} nodes, with a partition-id from 0 to {len(deployment.names) - 1}")
        network = GridNetwork(grid, AskedNodes(grid, len(deployment.names)))
        progress = listener or (lambda update: tell(_progress(update)))
        deployment.run(network, progress, StatusFile(deployment.out), tell)

    return app


def _progress(update: Update) -> str:
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


Nodes = Callable[[], Mapping[int, tuple[int, str]]]
"""The connected sites: from their numbers to Flower's node ids, and a mark that changes when a node connects anew."""


class GridNetwork:
    """Carries requests and answers over a Flower Grid (see :class:`fedstrata.deployment.federation.Network`)."""

    def __init__(
        self,
        grid: Grid,
        nodes: Nodes,
        seconds_between: float = 0.5,
        forget: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.grid = grid
        self.nodes = nodes
        self.seconds_between = seconds_between
        self.forget = forget
        self._connected: dict[int, tuple[int, str]] = {}
        self._open: dict[str, int] = {}

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def send(self, site: int, request: Request) -> None:
        """Send a request to a site that is connected; what was asked of it before is not waited for any more."""
        if request.kind != "notice":
            for message in [message for message, asked in self._open.items() if asked == site]:
                self._open.pop(message)
                self.forget(message)
        if site in self._connected:
            node, _ = self._connected[site]
            [message] = push(self.grid, [(node, request)])
            self._open[message] = site

    def receive(self, seconds: float) -> list[Event]:
        """Return who has connected and what was answered, after waiting at most so long for the first of it."""
        end = self.now() + seconds
        while True:
            events = [*self._joined(), *self._answered()]
            left = end - self.now()
            if events or left <= 0:
                return events
            time.sleep(min(self.seconds_between, left))

    def _joined(self) -> list[Event]:
        nodes = dict(self.nodes())
        new = [site for site, node in nodes.items() if self._connected.get(site) != node]
        self._connected = nodes
        return [Event(site, joined=True) for site in new]

    def _answered(self) -> list[Event]:
        events = []
        for message in self.grid.pull_messages(list(self._open)) if self._open else ():
            site = self._open.pop(message.metadata.reply_to_message_id, None)
            if site is not None:
                event = _event(site, message)
                events += [] if event is None else [event]
        return events


def push(grid: Grid, requests: Iterable[tuple[int, Request]]) -> list[str]:
    """Send requests to nodes; return the ids under which their answers will come."""
    from flwr.app import Message

    messages = [
        Message(
            to_record(request.header(), request.payload),
            node,
            _TYPES.get(request.kind, "query"),
            ttl=_SECONDS_TO_LIVE,
            group_id=str(request.round),
        )
        for node, request in requests
    ]
    return list(grid.push_messages(messages))


def _event(site: int, message: Message) -> Event | None:
    """Read an answer. A message that Flower gave up is none: its site is asked again when it connects."""
    from flwr.common.constant import ErrorCode

    if message.has_error():
        if message.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
            return Event(site, failure=str(message.error.reason)[:500])
        return None
    try:
        return Event(site, Reply.read(*from_record(message.content)))
    except ProtocolError as error:
        return Event(site, failure=str(error))


class AskedNodes:
    """Finds out which node is which site by asking every new node for its ``partition-id``."""

    def __init__(self, grid: Grid, sites: int, seconds_between: float = 1.0) -> None:
        self.grid = grid
        self.sites = sites
        self.seconds_between = seconds_between
        self._asked: dict[str, int] = {}
        self._known: dict[int, int] = {}
        self._last = -seconds_between

    def __call__(self) -> dict[int, tuple[int, str]]:
        """List the sites that are there."""
        if time.monotonic() - self._last >= self.seconds_between:
            self._last = time.monotonic()
            self._ask(set(self.grid.get_node_ids()))
        return {number: (node, "") for node, number in self._known.items()}

    def _ask(self, here: set[int]) -> None:
        new = sorted(here - set(self._asked.values()) - set(self._known))
        if new:
            messages = push(self.grid, [(node, Request("who")) for node in new])
            self._asked |= dict(zip(messages, new, strict=True))
        for message in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            node = self._asked.pop(message.metadata.reply_to_message_id, None)
            event = None if node is None else _event(0, message)
            number = None if event is None or event.reply is None else event.reply.facts.get("number")
            if node is not None and type(number) is int and 0 <= number < self.sites:
                self._known[node] = number
        self._known = {node: number for node, number in self._known.items() if node in here}
