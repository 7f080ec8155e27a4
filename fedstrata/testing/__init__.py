"""Checks that other people's components can be held to, as those that come with the package are.

:func:`check_method` runs the whole contract of methods, :func:`check_diagnostic` that of diagnostics,
:func:`check_model`, :func:`check_dataset` and :func:`check_loss` what engines rely on. Each raises an
:class:`AssertionError` that says what does not hold::

    from fedstrata.testing import check_method

    def test_my_method():
        check_method("my-method(strength=0.5)")
"""

from fedstrata.testing.datasets import check_dataset
from fedstrata.testing.diagnostics import check_diagnostic
from fedstrata.testing.losses import check_loss
from fedstrata.testing.methods import METHOD_CHECKS, check_method
from fedstrata.testing.models import check_model

__all__ = ["METHOD_CHECKS", "check_dataset", "check_diagnostic", "check_loss", "check_method", "check_model"]
