"""Mixtures of compact posteriors beside deep ensembles of equal bytes."""
