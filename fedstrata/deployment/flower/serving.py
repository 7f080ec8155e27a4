"""A server's run over the sites that connect with its own SuperLink."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from fedstrata.callbacks import Listener
from fedstrata.deployment.federation import Standing
from fedstrata.deployment.flower.grid import GridNetwork
from fedstrata.deployment.flower.superlink import SuperLink
from fedstrata.deployment.server import Deployment

_SECONDS_BETWEEN_LOOKS = 0.02


def serve(
    deployment: Deployment,
    link: SuperLink,
    listener: Listener | None = None,
    watch: Callable[[Standing], None] = lambda standing: None,
    log: Callable[[str], None] = lambda line: None,
    check: Callable[[], None] = lambda: None,
    revoked: Callable[[], Iterable[int]] = tuple,
    refused: Callable[[str, str, str], None] = lambda address, fingerprint, reason: None,
    connected: Callable[[int, str], None] = lambda site, address: None,
) -> dict[str, Any]:
    """Run a deployment over the sites that connect with a SuperLink; ``check`` may stop it while it waits.

    ``revoked`` tells now and then which sites are refused from then on. ``refused`` is told from where, with which key
    and why requests were refused, which is logged too, and ``connected`` which site has come from where.
    """

    def tell_refused(address: str, fingerprint: str, reason: str) -> None:
        log(f"a request from {address} is refused: {reason} (its key has the fingerprint {fingerprint})")
        refused(address, fingerprint, reason)

    link.refused, link.connected = tell_refused, connected

    def nodes() -> dict[int, tuple[int, str]]:
        check()
        return link.nodes()

    network = GridNetwork(link.grid(), nodes, _SECONDS_BETWEEN_LOOKS, link.forget, revoked, link.allow, link.failures)
    return replace(deployment, traffic=link.traffic).run(network, listener, watch, log)
