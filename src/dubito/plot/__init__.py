"""Pictures by matplotlib (`pip install 'dubito[report]'`): each function draws on one axis and returns it.

Without an axis they make a figure of their own, unknown to pyplot: `axis.figure.savefig("name.pdf")` keeps it, and
a notebook shows `axis.figure`.
"""

from .fan import regression_fan as regression_fan
from .learning import active_learning_curve as active_learning_curve
from .reliability import reliability as reliability
from .spectra import explained_variance as explained_variance
from .spectra import std_map as std_map
from .spectra import stds_over_training as stds_over_training
from .surface import class_draws as class_draws
from .surface import loss_surface as loss_surface
from .uncertainty import decomposition as decomposition
from .uncertainty import ood_histogram as ood_histogram
