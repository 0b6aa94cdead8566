"""Stored posteriors and checkpoints that must load for ever; `make.py` wrote them."""
