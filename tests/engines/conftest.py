"""Both ways out of ``vmap``: by private calls of PyTorch and by documented ones."""

from __future__ import annotations

import pytest

from fedstrata import private_torch
from fedstrata.engines import norms, operations


@pytest.fixture(params=[private_torch.step_out_privately, private_torch.step_out_documented])
def way_out_of_vmap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operations for many clients take one way, then the other."""
    for module in (norms, operations):
        monkeypatch.setattr(module, "for_all_clients", request.param)
