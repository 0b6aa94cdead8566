"""Rank-1 Bayesian neural networks: distributions over the factors of a BatchEnsemble."""
