"""Hamiltonian Monte Carlo for small networks: draws from the posterior itself, to judge others by [Neal 1996].

Chains are run by Pyro (the extra `reference`). Weights can be exchanged and signs flipped without changing the
function, so what must agree between chains is not the weights but what they answer on the training rows.
"""

from .method import HMC as HMC
from .posterior import HMCPosterior as HMCPosterior
