"""Models and arguments on device "meta", captured as if they were on the device that will train them.

A step on device "meta" is another one: autograd stops in some of its kernels, such as that of
`nll_loss`, and operators are chosen for no device. Fake tensors have shapes and no data too, but
they are on a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from scheduler.pytorch.capture.exporting.flat_step import ModuleWithLoss
from scheduler.pytorch.torch_private.modules import with_tensors
from scheduler.pytorch.torch_private.tensors import FakeTensorMode, fake_mode_of, fake_on_device


@contextlib.contextmanager
def fake_in_place_of_meta(core: ModuleWithLoss, given: Sequence[Tensor], device: str = "cpu") -> Iterator[list[Tensor]]:
    """Replace what is on device "meta" by fake tensors, and yield the arguments after that.

    Afterwards, everything is as it was.

    Parameters
    ----------
    core : ModuleWithLoss
    given : sequence of Tensor
        The distinct tensors in the arguments.
    device : str
        Where the fake tensors are.
    """
    registered = dict((*core.named_parameters(remove_duplicate=False), *core.named_buffers(remove_duplicate=False)))
    tensors = [*registered.values(), *given, *(place.get() for place in core.places)]
    if not any(tensor.is_meta for tensor in tensors):
        yield list(given)
        return
    mode = next((found for tensor in tensors if (found := fake_mode_of(tensor)) is not None), None) or FakeTensorMode()
    fakes: dict[int, Tensor] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in fakes:
            fakes[id(tensor)] = fake_on_device(tensor, mode, device)
        return fakes[id(tensor)]

    with contextlib.ExitStack() as stack:
        stack.enter_context(with_tensors(core, {name: replaced(tensor) for name, tensor in registered.items()}))
        for place in core.places:
            if (tensor := place.get()).is_meta:
                stack.callback(place.put(replaced(tensor)))
        yield [replaced(tensor) for tensor in given]
