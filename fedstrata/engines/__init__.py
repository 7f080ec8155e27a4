"""Engines: the same round for one client at a time, for all at once, or over a network."""
