"""BALI: layer-wise Bayesian inference by matrix-variate Normals (Kurle, Klushyn, Herbrich 2024)."""
