"""A posterior in one file that runs anywhere: graphs for ONNX, programs of `torch.export`."""

from .posterior import export as export
from .posterior import write_module as write_module
