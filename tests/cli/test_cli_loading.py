"""Loading PyTorch: what is imported is no garbage, and other people's processes are left alone."""

from __future__ import annotations

import gc
import subprocess
import sys

from fedstrata.cli.loading import loading_pytorch

LOADS = """
import gc
from fedstrata.cli.loading import loading_pytorch
with loading_pytorch(quiet=True):
    import torch
    assert not gc.isenabled()
assert gc.isenabled()
print(gc.get_freeze_count())
"""


def test_what_was_imported_is_never_looked_through_again() -> None:
    told = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, check=True)
    assert int(told.stdout) > 50_000


def test_a_process_that_has_pytorch_already_is_left_as_it_is() -> None:
    before = gc.get_freeze_count()
    with loading_pytorch(quiet=True):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
