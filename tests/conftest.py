"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# Properties are checked without a time limit per example: a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
