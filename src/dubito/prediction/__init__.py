"""What a posterior says about new rows: the answer, how sure it is, and where the uncertainty comes from."""

from .base import Prediction as Prediction
from .classes import BernoulliPrediction as BernoulliPrediction
from .classes import CategoricalPrediction as CategoricalPrediction
from .classes import ClassPrediction as ClassPrediction
from .formulas import FunctionVariance as FunctionVariance
from .formulas import Weights as Weights
from .formulas import aligned as aligned
from .formulas import entropy as entropy
from .formulas import log_sum_exp as log_sum_exp
from .formulas import normal_log_prob as normal_log_prob
from .formulas import not_binary as not_binary
from .formulas import per_row as per_row
from .formulas import require_answers as require_answers
from .formulas import std_per_row as std_per_row
from .formulas import sum_events as sum_events
from .mixed import mixed as mixed
from .mixtures import CountPrediction as CountPrediction
from .mixtures import MixturePrediction as MixturePrediction
from .mixtures import OutputPrediction as OutputPrediction
from .mixtures import StudentTPrediction as StudentTPrediction
from .mixtures import count_log_prob as count_log_prob
from .mixtures import student_t_log_prob as student_t_log_prob
from .options import FORMS as FORMS
from .options import PredictionOptions as PredictionOptions
from .real import RealPrediction as RealPrediction
