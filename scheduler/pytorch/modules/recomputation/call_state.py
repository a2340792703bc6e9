"""What a call of a module finds besides its arguments: to recompute the call, it is put back for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.backends import cuda

from scheduler.errors import ExecutionError
from scheduler.pytorch.capture.kept_state import RandomState
from scheduler.pytorch.guards.outside_states import OutsideState
from scheduler.pytorch.modules.recomputation.contents import Attributes, Contents
from scheduler.pytorch.torch_private.modules import buffers_of, is_batch_norm, parameters_of, submodules_of
from scheduler.pytorch.torch_private.tensors import is_traceable_wrapper_subclass, version_of

ChangingBuffers = dict[tuple[nn.Module, str], bool]
"""Whether calls change a buffer in place, for each that a call has found: only those are copied from then on."""

_ATTENTION_KERNELS = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)


class Parts:
    """A module and all modules inside it, which are listed anew only once one of them has other submodules.

    Attributes
    ----------
    modules : list of nn.Module
        Those whose state Python can put back.
    attributes : dict of nn.Module to Attributes
        What modules were last seen to hold, of those that hold nothing that has contents.
    has_script : bool
        Whether there is a TorchScript module among the others.
    refusal : str
        Why what a call of the module changes cannot be put back, "" if it can.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.attributes: dict[nn.Module, Attributes] = {}
        self._list()

    def _list(self) -> None:
        parts = [*self._module.modules()]
        scripts = [part for part in parts if isinstance(part, torch.jit.ScriptModule)]
        self.modules = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
        self._inside = [tuple(submodules_of(part).values()) for part in self.modules]
        self.has_script = bool(scripts)
        has_buffers = any(next(part.buffers(), None) is not None for part in scripts)
        self.refusal = _SCRIPT_WITH_BUFFERS if has_buffers else ""

    def update(self) -> None:
        """List the modules anew if one of them has other submodules."""
        for part, inside in zip(self.modules, self._inside, strict=True):
            if tuple(submodules_of(part).values()) != inside:
                self._list()
                return


_SCRIPT_WITH_BUFFERS = (
    "it has a TorchScript module with buffers, which a call may change where Python cannot put them back"
)


def tensors_held_for(parts: Parts) -> list[Tensor]:
    """Return the tensors in attributes of modules, which are kept for a recomputation of a call of them."""
    return Contents(parts.modules, parts.attributes).tensors()


class CallState:
    """Random states, buffers, attributes and training flags as a call finds them.

    Parameters
    ----------
    parts : Parts
        Of the module that is called.
    name : str
        Its qualified name.
    generators : sequence of OutsideState
        Random generators in addition to the global ones.
    changing : ChangingBuffers
        Completed by `end`.
    """

    def __init__(self, parts: Parts, name: str, generators: Sequence[OutsideState], changing: ChangingBuffers) -> None:
        self._name = name
        self._changing = changing
        self._modules = parts.modules
        self._random = RandomState(generators)
        self._buffers = [
            _Buffer(part, key, buffer, is_copied=changing.get((part, key), True) or _normalizes(part))
            for part in self._modules
            for key, buffer in buffers_of(part).items()
        ]
        self._parameters = [
            (part, key, parameter, _version(parameter))
            for part in self._modules
            for key, parameter in parameters_of(part).items()
        ]
        self._contents = Contents(self._modules, parts.attributes)
        self._kernels = _attention_kernels()

    def end(self) -> None:
        """Forget what the call has left as it was.

        Raises
        ------
        ExecutionError
            If the call has changed a buffer that earlier calls left as it was, and that has not
            been copied.
        """
        self._random = self._random.changed(self._random.now())
        for buffer in self._buffers:
            key = (buffer.module, buffer.name)
            if self._changing.get(key) or buffer.has_changed() or buffer.has_other_value():
                self._changing[key] = True
                if buffer.copy is None:
                    raise ExecutionError(
                        f'a call of "{self._name}" has changed the buffer "{buffer.name}" in place, which no call had'
                        " changed before, so its old value is lost and the call cannot be recomputed. From now on"
                        " it is copied: repeat the step"
                    )
            else:
                self._changing.setdefault(key, False)
                buffer.copy = None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context in which everything is as the call found it; afterwards it is as it was before."""
        self._check_unchanged()
        random = self._random.now()
        now, kernels = self._contents.now(), _attention_kernels()
        buffers = [(buffers_of(one.module), one.name, buffers_of(one.module).get(one.name)) for one in self._buffers]
        parameters = [
            (parameters_of(part), key, parameters_of(part).get(key), then)
            for part, key, then, _ in self._parameters
            if _are_exchanged(parameters_of(part).get(key), then)
        ]
        try:
            self._random.restore()
            self._contents.put(now)
            for buffer in self._buffers:
                buffers_of(buffer.module)[buffer.name] = buffer.value()
            for held, key, _, then in parameters:
                held[key] = then
            _set_attention_kernels(self._kernels)
            yield
        finally:
            random.restore()
            now.put()
            for current, key, tensor in buffers:
                current[key] = tensor
            for held, key, parameter, _ in parameters:
                held[key] = parameter
            _set_attention_kernels(kernels)

    def _check_unchanged(self) -> None:
        changed = [f'parameter "{key}"' for _, key, then, version in self._parameters if _version(then) != version]
        changed += [f'buffer "{one.name}"' for one in self._buffers if one.copy is None and one.has_changed()]
        if changed:
            raise ExecutionError(
                f'the {changed[0]} was changed in place between a call of "{self._name}" and its recomputation in the'
                " backward: change it after the backward"
            )


class _Buffer:
    """A buffer as a call finds it, and its value if the call may change it in place."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor | None, *, is_copied: bool) -> None:
        self.module = module
        self.name = name
        self._tensor = tensor
        self._version = _version(tensor)
        self.copy = tensor.detach().clone() if is_copied and tensor is not None else None

    def has_changed(self) -> bool:
        return _version(self._tensor) != self._version

    def has_other_value(self) -> bool:
        """Return whether the value differs from the copy: batch normalization does not count as a change in place."""
        return self.copy is not None and self._tensor is not None and not torch.equal(self.copy, self._tensor)

    def value(self) -> Tensor | None:
        """Return the buffer, or a copy of its old value that a recomputation may change."""
        return self._tensor if self.copy is None else self.copy.clone()


def _normalizes(module: nn.Module) -> bool:
    return module.training and is_batch_norm(module)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else version_of(tensor)


def _are_exchanged(now: Tensor | None, then: Tensor | None) -> bool:
    """Return whether other tensors replaced the parameters during the forward, as `torch.func.functional_call` does.

    What libraries for distributed training exchange belongs to them.
    """
    return now is not then and not any(x is not None and is_traceable_wrapper_subclass(x) for x in (now, then))


def _attention_kernels() -> list[bool]:
    return [is_enabled() for is_enabled, _ in _ATTENTION_KERNELS]  # type: ignore[no-untyped-call]


def _set_attention_kernels(wanted: Iterable[bool]) -> None:
    for (is_enabled, enable), value in zip(_ATTENTION_KERNELS, wanted, strict=True):
        if is_enabled() != value:  # type: ignore[no-untyped-call]
            enable(value)
