from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from scheduler.pytorch.capture.arguments import Position, fill_arguments, leaf_paths, read_arguments, tensor_paths


def test_a_tensor_that_is_passed_twice_counts_once():
    x, y = torch.zeros(2), torch.ones(3)
    signature, tensors = read_arguments((x, [y, 5]), {"again": x})
    assert [id(tensor) for tensor in tensors] == [id(x), id(y)]
    assert signature.leaves == (Position(0), Position(1), 5, Position(0))


def test_arguments_are_filled_with_other_tensors():
    signature, _ = read_arguments((torch.zeros(2), [torch.ones(3), 5]), {"scale": 2.0})
    first, second = torch.zeros(2), torch.ones(3)
    assert fill_arguments(signature, [first, second]) == ((first, [second, 5]), {"scale": 2.0})


def test_paths_name_the_first_place_of_each_tensor():
    x, y = torch.zeros(2), torch.ones(3)
    signature, _ = read_arguments(([x],), {"mask": y, "again": x})
    assert tensor_paths(signature) == ["args[0][0]", "kwargs['mask']"]


@dataclass(frozen=True)
class Batch:
    image: torch.Tensor
    scale: float = 1.0


def test_objects_that_hold_tensors_are_divided_into_their_fields():
    x = torch.zeros(2)
    signature, tensors = read_arguments((Batch(x), {"inner": [Batch(x, 2.0)]}), {})
    assert len(tensors) == 1
    assert signature.leaves == (Position(0), 1.0, Position(0), 2.0)
    assert leaf_paths(signature) == [
        "args[0].image",
        "args[0].scale",
        "args[1]['inner'][0].image",
        "args[1]['inner'][0].scale",
    ]
    y = torch.ones(2)
    (first, second), _ = fill_arguments(signature, [y])
    assert first.image is y
    assert second["inner"][0].image is y
    assert second["inner"][0].scale == 2.0
    assert read_arguments((Batch(y), {"inner": [Batch(y, 2.0)]}), {})[0] == signature


def test_arrays_are_compared_by_value():
    signature, _ = read_arguments((np.arange(3),), {})
    assert read_arguments((np.arange(3),), {})[0] == signature
    assert read_arguments((np.arange(3) + 1,), {})[0] != signature
    assert read_arguments((np.arange(3.0),), {})[0] != signature
    assert np.array_equal(fill_arguments(signature, [])[0][0], np.arange(3))
