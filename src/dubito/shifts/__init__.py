"""Shifted data: common corruptions, noise, and rows out of distribution."""

from .constants import CONSTANTS as CONSTANTS
from .constants import CORRUPTIONS as CORRUPTIONS
from .constants import SEVERITIES as SEVERITIES
from .corruptions import corrupt as corrupt
from .corruptions import corruptions as corruptions
from .detection import Detection as Detection
from .detection import Histogram as Histogram
from .detection import detection as detection
from .detection import histogram as histogram
from .detection import scores as scores
from .evaluate import CorruptionResults as CorruptionResults
from .evaluate import evaluate_corruptions as evaluate_corruptions
from .jpeg import jpeg as jpeg
from .noise import gaussian_mixed as gaussian_mixed
from .noise import salt_and_pepper as salt_and_pepper
from .pairs import PAIRS as PAIRS
from .pairs import OODPair as OODPair
from .pairs import far_range as far_range
from .pairs import feature_shuffled as feature_shuffled
from .pairs import held_out as held_out
from .pairs import ood_pair as ood_pair
