"""Engines: the same round, for one client at a time by messages, or for all clients at once."""
