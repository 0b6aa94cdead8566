"""The frame of the papers' experiments: cells, scales, tables, claims, stored results, and how they are run."""

from . import show as show
from .experiment import Cell as Cell
from .experiment import Claim as Claim
from .experiment import Experiment as Experiment
from .experiment import Metric as Metric
from .experiment import Outcome as Outcome
from .experiment import Published as Published
from .experiment import Scale as Scale
from .experiment import Table as Table
from .experiment import Variant as Variant
from .jobs import run as run
from .judge import judged as judged
from .judge import rows as rows
from .store import Results as Results
from .tables import tables as tables
