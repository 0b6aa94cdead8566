"""Traced programs as files: checked, whole or not at all, without a trace of the machine that made them."""

import importlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..errors import ConfigError, NetworkError
from ..inputs import Inputs, named_tensors, take
from ..storage.whole import whole_file
from .graph import without_round_trips

#: The operators of a graph for ONNX are those of this version of its default set.
OPSET = 20
#: Numbers that are computed from constants when a file is written, not when it runs; larger ones would swell it.
FOLDED = 1024
#: What a node of a program remembers of the code that made it.
TRACES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "custom")


def write(
    program: ExportedProgram, module: nn.Module, inputs: Inputs, path: Path, max_bytes: int, *, exact: bool
) -> None:
    """Write a program, once its answers for some of the inputs are those of the module.

    Args:
        program: of the module.
        module: that was traced.
        inputs: rows.
        path: of the file, whose ending says what it is.
        max_bytes: the largest file.
        exact: whether the module answers alike at every call.
    """
    content, run = WRITERS[path.suffix](program, inputs)
    if len(content) > max_bytes:
        raise ConfigError(f"the file would have {len(content):,} bytes, more than max_bytes={max_bytes:,}; raise it")
    few = take(inputs, slice(3))
    answer, truth = run(few), call_named(module, few) if exact else {}
    for name, values in truth.items():
        size = float(values.nan_to_num().abs().max())
        if not torch.allclose(answer[name].to(values), values, rtol=1e-3, atol=1e-4 * max(size, 1.0), equal_nan=True):
            raise NetworkError(
                f"the exported {name} is not what the posterior answers: the network does something else when it is "
                "traced, such as a branch on the number of rows; rewrite that part"
            )
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


def call_named(module: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The answers of a module that takes inputs as `PredictiveModule` does."""
    with torch.no_grad():
        return module(**inputs) if isinstance(inputs, Mapping) else module(inputs)


def as_onnx(program: ExportedProgram, inputs: Inputs) -> tuple[bytes, Callable[[Inputs], dict[str, Tensor]]]:
    """A graph of ONNX as bytes, and what runs it."""
    onnx, runtime, optimizer, ir, passes = map(
        opened, ("onnx", "onnxruntime", "onnxscript.optimizer", "onnx_ir", "onnx_ir.passes.common")
    )
    outputs = list(call_named(program.module(), take(inputs, slice(2))))
    try:
        options = {"opset_version": OPSET, "optimize": False, "verbose": False}
        converted = torch.onnx.export(program, (), dynamo=True, **options)
    except torch.onnx.errors.OnnxExporterError as error:
        raise NetworkError(
            f"{missing(error)} has no counterpart among the operators of ONNX (opset {OPSET}); write that part of the "
            "network with other operators, or export to .pt2"
        ) from error
    assert converted is not None
    model, names = converted.model, input_names(inputs)
    optimizer.optimize_ir(model, input_size_limit=FOLDED, output_size_limit=FOLDED)
    without_round_trips(model, ir)
    passes.RemoveUnusedNodesPass()(model)
    passes.DeduplicateInitializersPass()(model)
    passes.NameFixPass()(model)
    passes.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    renamed = dict(zip((*model.graph.inputs, *model.graph.outputs), (*names, *outputs), strict=True))
    for value in (value for node in model.graph for value in node.outputs if value not in renamed):
        value.name = f"{value.name}_" if value.name in renamed.values() else value.name
    for value, name in renamed.items():
        value.name = name
    content = converted.model_proto.SerializeToString()
    onnx.checker.check_model(content, full_check=True)
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 3
    session = runtime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])

    def run(rows: Inputs) -> dict[str, Tensor]:
        arrays = (tensor.cpu().numpy() for _, tensor in named_tensors(rows))
        answer = session.run(outputs, dict(zip(names, arrays, strict=True)))
        return {name: torch.as_tensor(values) for name, values in zip(outputs, answer, strict=True)}

    return content, run


def as_program(program: ExportedProgram, inputs: Inputs) -> tuple[bytes, Callable[[Inputs], dict[str, Tensor]]]:
    """A program of `torch.export` as bytes, and what runs it."""
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                for key in TRACES:
                    node.meta.pop(key, None)
    program.example_inputs = None
    file = io.BytesIO()
    try:
        torch.export.save(program, file)
    except Exception as error:
        raise NetworkError(
            f"PyTorch {torch.__version__} cannot store the traced program: {str(error).splitlines()[0]}; export to "
            ".onnx, or take a newer PyTorch"
        ) from error
    run = torch.export.load(io.BytesIO(file.getvalue())).module()
    return file.getvalue(), lambda rows: call_named(run, rows)


WRITERS = {".onnx": as_onnx, ".pt2": as_program}


def input_names(inputs: Inputs) -> list[str]:
    """A name for each tensor: that of the network's argument, or `inputs`, numbered where there are several."""
    names = (re.findall(r"\w+", name) for name, _ in named_tensors(inputs))
    return ["_".join(parts[1:] if isinstance(inputs, Mapping) else parts) for parts in names]


def missing(error: BaseException | None) -> str:
    """The operator that an exporter could not translate."""
    while error is not None:
        matched = re.search(r"op='([\w.:]+)'|target=torch\.ops\.([\w.]+)", str(error))
        if matched:
            return matched.group(1) or matched.group(2)
        error = error.__cause__
    return "an operator of the network"


def opened(name: str) -> Any:
    """A module of the extra `onnx`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"graphs of ONNX need {name}: pip install 'dubito[onnx]'") from error


@contextmanager
def quiet() -> Iterator[None]:
    """While open, tracers do not tell about themselves."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
