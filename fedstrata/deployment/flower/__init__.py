"""All that knows Flower, which carries the messages between a server and its sites.

    messages.py     requests and replies as Flower messages
    grid.py         the network of a federation over a Flower Grid
    app.py          FedStrata as an ordinary Flower app
    superlink.py    a Flower SuperLink inside the server's process
    connections.py  its connections: how many, and how long a stranger may say nothing
    doorkeeper.py   what a request must show before it is read
    refusals.py     who was refused, and which of it is told
    objects.py      the pieces of messages in its memory
    serving.py      a server's run over its own SuperLink
    supernode.py    a Flower SuperNode inside the site's process
    explaining.py   why a site cannot connect, in a sentence
    internals.py    all that is used of Flower beside its documented interface, and what for

Public names are imported when they are first used; without Flower, the extra that brings it is named.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedstrata.errors import FedStrataError

if TYPE_CHECKING:
    from fedstrata.deployment.flower.app import app_of, client_app, configured, server_app
    from fedstrata.deployment.flower.grid import AskedNodes, GridNetwork
    from fedstrata.deployment.flower.serving import serve
    from fedstrata.deployment.flower.superlink import ServerCertificate, SuperLink
    from fedstrata.deployment.flower.supernode import SuperNode

__all__ = [
    "AskedNodes", "GridNetwork", "ServerCertificate", "SuperLink", "SuperNode", "app_of", "client_app", "configured",
    "need_flower", "serve", "server_app",
]  # fmt: skip

_HOMES = {
    "app": ("app_of", "client_app", "configured", "server_app"),
    "grid": ("AskedNodes", "GridNetwork"),
    "serving": ("serve",),
    "superlink": ("ServerCertificate", "SuperLink"),
    "supernode": ("SuperNode",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""What keeps Flower from calling home and from fetching packages, unless the environment says otherwise."""
for _name, _value in QUIET.items():  # here, because Flower looks when it is imported
    os.environ.setdefault(_name, _value)


def need_flower() -> None:
    """Make sure that Flower is there; without it, name the extra that brings it."""
    try:
        import flwr.app  # noqa: F401
    except ImportError:
        raise FedStrataError(
            "Running on real sites needs Flower; install it with: pip install 'fedstrata[flower]'"
        ) from None


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    need_flower()
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    """List what is public, imported or not."""
    return sorted({*globals(), *__all__})
