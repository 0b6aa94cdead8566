"""SWA and SWAG: the mean of a run's last weights, and the Gaussian they spread over."""

from .swa import SWA as SWA
from .swag import SWAG as SWAG
from .swag import SWAGPosterior as SWAGPosterior
