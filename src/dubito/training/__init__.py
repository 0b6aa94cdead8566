"""The one training loop and its settings."""

from ..fitting import Run as Run
from ..processes import Processes as Processes
from ..processes import current as current
from .auto import AutoTraining as AutoTraining
from .contract import Loss as Loss
from .contract import ObjectiveLike as ObjectiveLike
from .contract import Stepper as Stepper
from .contract import StepRecord as StepRecord
from .loop import train as train
from .optimizers import SGD as SGD
from .optimizers import Adam as Adam
from .optimizers import AdamW as AdamW
from .plan import Plan as Plan
from .plan import plan_run as plan_run
from .progress import Reached as Reached
from .progress import listened as listened
from .schedules import Constant as Constant
from .schedules import Cosine as Cosine
from .schedules import Linear as Linear
from .schedules import Step as Step
from .settings import KL as KL
from .settings import EarlyStopping as EarlyStopping
from .settings import Training as Training
from .steps import GradientStepper as GradientStepper
