"""Fewer nodes in a graph of ONNX: at one row each costs as much as a small product.

Draws are traced as rows side by side, [S·B, n], and factors meet them as [S, B, n]. A product with a matrix and
functions of single numbers read both alike, so that what leads from one form to the other and back can go.
"""

from typing import Any

#: Functions of single numbers.
POINTWISE = {"Relu", "Tanh", "Sigmoid", "Elu", "LeakyRelu", "Softplus", "Erf", "Gelu", "HardSwish", "Selu", "Exp"}
DENSE = {"transA": 0, "transB": 1, "alpha": 1.0, "beta": 1.0}


def without_round_trips(model: Any, ir: Any) -> None:
    """Change a model of `onnx_ir` in place, whose values have shapes; what is unused stays in it.

    Args:
        model: of a traced program.
        ir: the module `onnx_ir`.
    """
    for node in [node for node in model.graph if node.op_type == "Reshape"]:
        parted = _parted(node, ir)
        if parted is not None:
            ir.convenience.replace_all_uses_with(node.outputs[0], parted)
    for node in [node for node in model.graph if node.op_type == "Mul"]:
        repeat, factors = node.inputs[0].producer(), node.inputs[1]
        if repeat is None or repeat.op_type != "Expand" or factors.const_value is None:
            continue
        sizes, rows = _sizes(node.outputs[0]), _sizes(repeat.inputs[0])
        ahead = _sizes(factors)
        if sizes and rows and ahead and sizes[0] == ahead[0] and sizes[1:] == rows:  # factors repeat the rows
            node.replace_input_with(0, repeat.inputs[0])


def _parted(back: Any, ir: Any) -> Any:
    """What [S, B, n] → [S·B, n] → layers → [S, B, m] computes, by the layers on [S, B, n]; None if it is not that."""
    end, layers, value = _sizes(back.outputs[0]), [], back.inputs[0]
    if end is not None and _sizes(value) == end:
        return value
    while (node := value.producer()) is not None and len(value.uses()) == 1 and not value.is_graph_output():
        if node.op_type == "Reshape":
            break
        if not (node.op_type in POINTWISE or _is_dense(node)):
            return None
        layers.append(node)
        value = node.inputs[0]
    else:
        return None
    start, flat = _sizes(node.inputs[0]), _sizes(value)
    if start is None or end is None or flat is None or (len(start), len(flat), len(end)) != (3, 2, 3):
        return None
    if start[:2] != end[:2] or start[2] != flat[1]:
        return None
    value = node.inputs[0]
    for layer in reversed(layers):
        value = _on_parts(layer, value, ir)
    return value


def _is_dense(node: Any) -> bool:
    """Whether it is x Wᵀ (+ b), with a weight of its own."""
    if node.op_type != "Gemm" or node.inputs[1].const_value is None or len(node.inputs[1].uses()) > 1:
        return False
    return {name: attribute.value for name, attribute in node.attributes.items()} == DENSE


def _on_parts(layer: Any, value: Any, ir: Any) -> Any:
    """The same layer on [S, B, n]."""
    old = layer.outputs[0]
    if layer.op_type in POINTWISE:
        return _inserted(layer, layer.op_type, [value], value.shape, ir)
    weight, *bias = layer.inputs[1:]
    name = f"{weight.name}_transposed"
    transposed = ir.Value(name=name, const_value=ir.tensor(weight.const_value.numpy().T.copy(), name=name))
    layer.graph.initializers[name] = transposed
    sizes = ir.Shape([*value.shape[:2], old.shape[-1]])
    product = _inserted(layer, "MatMul", [value, transposed], sizes, ir)
    return _inserted(layer, "Add", [product, *bias], sizes, ir) if bias else product


def _inserted(layer: Any, kind: str, inputs: list[Any], sizes: Any, ir: Any) -> Any:
    """The output of a new node before a layer's."""
    attributes = list(layer.attributes.values()) if kind == layer.op_type else []
    node = ir.Node("", kind, inputs, attributes)
    layer.graph.insert_before(layer, node)
    node.outputs[0].shape, node.outputs[0].type = sizes, layer.outputs[0].type
    return node.outputs[0]


def _sizes(value: Any) -> list[Any] | None:
    """The shape, where every size has a number or a name."""
    sizes = None if value.shape is None else [getattr(size, "value", size) for size in value.shape]
    return None if sizes is None or None in sizes else sizes
