"""Small training graphs whose figures can be counted by hand."""

from __future__ import annotations

import scheduler as sc
from scheduler.graph import Phase


def uniform_chain(layers: int, *, size: int = 4, forward: float = 1.0, backward: float = 2.0) -> sc.Graph:
    """A chain of equal layers: backward i reads the gradient and the layer's input; the batch is resident."""
    tensors = [sc.Tensor(f"x{i}", size) for i in range(layers + 1)]
    tensors += [sc.Tensor(f"g{i}", size) for i in range(layers + 1)]
    operations = [sc.Operation(f"f{i}", [f"x{i}"], [f"x{i + 1}"], forward) for i in range(layers)]
    operations.append(sc.Operation("loss", [f"x{layers}"], [f"g{layers}"], 0.0, phase="backward"))
    operations += [
        sc.Operation(f"b{i}", [f"g{i + 1}", f"x{i}"], [f"g{i}"], backward, phase="backward")
        for i in reversed(range(layers))
    ]
    return sc.Graph(operations, tensors, resident=["x0"], results=["g0"], name=f"uniform chain of {layers}")


def two_kernels(layers: int, *, is_fast_first: bool) -> sc.Graph:
    """A chain of which each operation has two kernels: one takes 1 with a workspace of 10, the other 2 without."""
    tensors = [sc.Tensor("x0", 4), sc.Tensor("loss", 0)]

    def kernels(name: str, inputs: list[str], output: str, phase: Phase) -> list[sc.Operation]:
        tensors.append(sc.Tensor(output, 4))
        fast = sc.Operation(f"{name}_fast", inputs, [output], 1.0, 10, phase=phase)
        slow = sc.Operation(f"{name}_slow", inputs, [output], 2.0, phase=phase)
        return [fast, slow] if is_fast_first else [slow, fast]

    operations: list[sc.Operation] = []
    for i in range(layers):
        operations += kernels(f"f{i}", [f"x{i}"], f"x{i + 1}", "forward")
    operations.append(sc.Operation("loss", [f"x{layers}"], ["loss"], 0.0))
    for i in reversed(range(layers)):
        inputs = [f"x{i}", f"g{i + 1}"] if i + 1 < layers else [f"x{i}", "loss"]
        operations += kernels(f"b{i}", inputs, f"g{i}", "backward")
    return sc.Graph(operations, tensors, resident=["x0"], results=["loss", "g0"])


def conv_net(blocks: int, *, width: int = 64) -> sc.Graph:
    """Residual blocks of convolution, normalization and ReLU: the cheap half is worth recomputing."""
    tensors = [sc.Tensor("x0", width), sc.Tensor("loss", 1)]
    forward: list[sc.Operation] = []
    backward: list[sc.Operation] = []
    for i in range(blocks):
        names = [f"x{i}", f"conv{i}", f"norm{i}", f"relu{i}", f"x{i + 1}"]
        tensors += [sc.Tensor(name, width) for name in names[1:]]
        tensors += [sc.Tensor(f"d_{name}", width) for name in names[1:]]
        x, conv, norm, relu, y = names
        forward += [
            sc.Operation(f"conv{i}", [x], [conv], 100.0),
            sc.Operation(f"norm{i}", [conv], [norm], 3.0),
            sc.Operation(f"relu{i}", [norm], [relu], 1.0),
            sc.Operation(f"add{i}", [x, relu], [y], 1.0),
        ]
        into = [f"d_x{i}"] if i else ["d_x0"]
        backward = [
            sc.Operation(f"relu{i}_backward", [f"d_x{i + 1}", relu], [f"d_relu{i}"], 1.0, phase="backward"),
            sc.Operation(f"norm{i}_backward", [f"d_relu{i}", conv], [f"d_norm{i}"], 5.0, phase="backward"),
            sc.Operation(f"conv{i}_backward", [f"d_norm{i}", x], [f"d_conv{i}"], 200.0, phase="backward"),
            sc.Operation(f"add{i}_backward", [f"d_conv{i}", f"d_x{i + 1}"], into, 1.0, phase="backward"),
            *backward,
        ]
    tensors.append(sc.Tensor("d_x0", width))
    forward.append(sc.Operation("loss", [f"x{blocks}"], ["loss"], 1.0))
    first = sc.Operation("loss_backward", ["loss", f"x{blocks}"], [f"d_x{blocks}"], 1.0, phase="backward")
    return sc.Graph([*forward, first, *backward], tensors, resident=["x0"], results=["loss", "d_x0"])


def three_layers() -> sc.Chain:
    """The worked case: outputs and input of 2 bytes, 1 saved each, forward 1, backward 2, output kept."""
    return sc.Chain([sc.Layer(f"l{i}", 1, 2, 2, 1, keeps_output=True) for i in range(3)], input_bytes=2)


def branches(count: int) -> sc.Graph:
    """Branches of one large tensor and one small result each: one after the other needs no recomputation."""
    numbers = range(count)
    return sc.Graph(
        [
            *(sc.Operation(f"large{i}", [], [f"large{i}"], 1.0) for i in numbers),
            *(sc.Operation(f"small{i}", [f"large{i}"], [f"small{i}"], 1.0) for i in numbers),
        ],
        [*(sc.Tensor(f"large{i}", 100) for i in numbers), *(sc.Tensor(f"small{i}", 1) for i in numbers)],
        results=[f"small{i}" for i in numbers],
    )
