"""A posterior in one file that runs anywhere: graphs for ONNX, programs of `torch.export`."""

from .posterior import checked_path as checked_path
from .posterior import example_rows as example_rows
from .posterior import export as export
from .posterior import served as served
from .posterior import write_module as write_module
