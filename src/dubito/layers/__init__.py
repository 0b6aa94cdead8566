"""What the library knows about layers: kinds of torch functions, their forms, and passes through private shells."""

from . import attention as attention
from . import convolution as convolution
from . import embedding as embedding
from . import linear as linear
from . import norm as norm
from . import recurrent as recurrent
from .context import Context as Context
from .dry_run import survey as survey
from .form import Form as Form
from .form import Product as Product
from .kinds import NoRule as NoRule
from .kinds import kind as kind
from .layout import Layout as Layout
from .linear import Dense as Dense
from .uses import Survey as Survey
from .uses import Use as Use
