from __future__ import annotations

import torch

from scheduler.pytorch.capture.arguments import Position, fill_arguments, read_arguments, tensor_paths


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
