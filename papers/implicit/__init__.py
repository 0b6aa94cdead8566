"""Implicit Bayesian neural networks: noise of a mixture on the nodes."""
