"""The registry of methods; importing :mod:`fedstrata.methods` fills it."""

from __future__ import annotations

from fedstrata.methods.contract.part import Part
from fedstrata.spec import Registry

methods: Registry[Part] = Registry("method")
