"""The papers' networks, each with its counts of parameters reproduced."""

from .densenet import densenet121 as densenet121
from .densenet import densenet161 as densenet161
from .plain import lenet as lenet
from .plain import mlp as mlp
from .plain import vgg as vgg
from .plain import vgg16 as vgg16
from .recurrent import clinical_lstm as clinical_lstm
from .recurrent import imdb_lstm as imdb_lstm
from .registry import make as make
from .registry import names as names
from .residual import resnet18 as resnet18
from .residual import resnet50 as resnet50
from .residual import resnet152 as resnet152
from .residual import tfp_resnet18 as tfp_resnet18
from .residual import wide_resnet as wide_resnet
