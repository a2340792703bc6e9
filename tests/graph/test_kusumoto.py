"""The text form of Kusumoto et al. 2019: the joint graph that it stands for, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import scheduler as sc
from scheduler.errors import GraphFormatError, InvalidGraphError
from scheduler.graph.kusumoto import parse_computation_graph
from scheduler.problem import Problem

# A convolution y = conv(x, w), z = relu(y), loss = sum(y, z), with the batch x and the weight w.
TINY = """\
5 6
x 1000 _
w 500 /conv/W
y 8 _
z 4 _
loss 1 _
forward
2 1
y _
z _
loss
Sum
{}
forward
1 1
y _
z
ReLU
{}
forward
2 1
x _
w _
y
Convolution2DFunction
{}
backward
1 2
loss gradient
y
z
Sum
{}
backward
2 1
z gradient
z output
y
ReLU
{}
backward
3 2
y gradient
x input
w input
x
w
Convolution2DFunction
{}
"""


def test_a_file_gives_a_forward_and_a_backward_operation_for_each_function() -> None:
    graph = parse_computation_graph(TINY)
    assert [(op.name, op.inputs, op.time, op.phase) for op in graph.operations] == [
        ("Convolution2DFunction_y", (), 10.0, "forward"),
        ("ReLU_z", ("Convolution2DFunction_y",), 1.0, "forward"),
        ("Sum_loss", ("Convolution2DFunction_y", "ReLU_z"), 1.0, "forward"),
        ("Sum_loss_backward", ("Sum_loss",), 2.0, "backward"),
        ("ReLU_z_backward", ("Sum_loss_backward", "ReLU_z"), 2.0, "backward"),
        ("Convolution2DFunction_y_backward", ("Sum_loss_backward", "ReLU_z_backward"), 20.0, "backward"),
    ]
    assert graph.tensor("Convolution2DFunction_y_backward").size_bytes == 8
    assert graph.resident == graph.results == ()
    assert len(graph.required) == 6


def test_the_peak_of_the_tiny_file_is_the_one_counted_by_hand() -> None:
    # y | y z | y z loss = 13 | z loss dloss = 6 | z dloss dz = 9 | dloss dz dy = 13.
    problem = Problem(parse_computation_graph(TINY), 0)
    baseline = problem.baseline
    assert baseline.peak_bytes == 13
    assert baseline.peak_operation == "Sum_loss"
    assert baseline.time == 36.0
    moments = zip(problem.save_everything, baseline.memory, strict=True)
    assert [int(m) for action, m in moments if isinstance(action, sc.Compute)] == [8, 12, 13, 6, 9, 13]


@pytest.mark.parametrize("format", ["auto", "computation-graph"])
def test_read_graph_reads_it_with_and_without_the_format(tmp_path: Path, format: str) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text(TINY)
    graph = sc.read_graph(path, format=format)
    assert graph.name == "tiny"
    assert graph.digest == parse_computation_graph(TINY, name="tiny").digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("5 6", "5 7", r"the file ends after 49 lines, where a type|a function must begin with"),
        ("5 6", "5 5", "text after the last of 5 functions"),
        ("5 6", "4 6", "a function must begin with"),
        ("5 6", "5", "the numbers of values and of functions"),
        ("y 8 _", "y eight _", "a value must read"),
        ("y 8 _", "x 8 _", "value x is listed twice"),
        ("z gradient", "q gradient", "an input must read"),
        ("z gradient", "z slope", "an input must read"),
        ("z gradient", "loss gradient", "gradient of value loss is read by a second"),
        ("z gradient", "z input", "no backward function reads the gradient of value z"),
        ("1 1\ny _\nz\nReLU", "1 1\ny _\nq\nReLU", "an output must be a listed value"),
        ("1 1\ny _\nz\nReLU", "1 2\ny _\nz\nloss\nReLU", "must produce one value, got 2"),
        ("1 1\ny _\nz\nReLU", "1 1\ny _\nloss\nReLU", "produced by a second function"),
        ("1 1\ny _\nz\nReLU", "1 -1\ny _\nz\nReLU", "the numbers of inputs"),
        ("1 1\ny _\nz\nReLU", "1 1\ny _\nz\n", "a type must be printable"),
        ("forward", "backward", "no forward function"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TINY
    path = tmp_path / "damaged.txt"
    path.write_text(TINY.replace(old, new) if old == "forward" else TINY.replace(old, new, 1))
    with pytest.raises(GraphFormatError, match=message):
        sc.read_graph(path, format="computation-graph")


@pytest.mark.parametrize("lines", range(49))
def test_a_file_cut_off_anywhere_is_refused(lines: int) -> None:
    with pytest.raises(GraphFormatError):
        parse_computation_graph("\n".join(TINY.splitlines()[:lines]))


def test_a_cycle_is_named() -> None:
    with pytest.raises(InvalidGraphError, match="cycle"):
        parse_computation_graph(TINY.replace("2 1\nx _\nw _\ny\n", "2 1\nx _\nz _\ny\n"))
