"""Adapters on a small transformer: no paper's table, the figures of `docs/adapters.md`."""
