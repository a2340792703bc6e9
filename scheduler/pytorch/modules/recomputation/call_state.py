"""What a call of a module finds besides its arguments: to recompute the call, it is put back for a while."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.backends import cuda

from scheduler.errors import ExecutionError
from scheduler.pytorch.capture.kept_state import RandomState
from scheduler.pytorch.guards.outside_states import OutsideState
from scheduler.pytorch.guards.parts import OF_EVERY_MODULE
from scheduler.pytorch.guards.read_names import is_installed, is_library, vars_of
from scheduler.pytorch.torch_private.modules import COMPILED_CALL, buffers_of, is_batch_norm, parameters_of
from scheduler.pytorch.torch_private.tensors import is_traceable_wrapper_subclass, version_of

ChangingBuffers = dict[tuple[nn.Module, str], bool]
"""Whether calls change a buffer in place, for each that a call has found: only those are copied from then on."""

_ATTENTION_KERNELS = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)


def cannot_be_restored(module: nn.Module) -> str:
    """Return why what a call of a module changes cannot be put back, "" if it can."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule) and next(part.buffers(), None) is not None:
            return "it has a TorchScript module with buffers, which a call may change where Python cannot put them back"
    return ""


def tensors_held_for(module: nn.Module) -> list[Tensor]:
    """Return the tensors in attributes of a module and its submodules, which are kept for a recomputation."""
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    return _Contents(parts).tensors()


class CallState:
    """Random states, buffers, attributes and training flags as a call finds them.

    Parameters
    ----------
    module : nn.Module
        The module that is called.
    name : str
        Its qualified name.
    generators : sequence of OutsideState
        Random generators in addition to the global ones.
    changing : ChangingBuffers
        Completed by `end`.
    """

    def __init__(
        self, module: nn.Module, name: str, generators: Sequence[OutsideState], changing: ChangingBuffers
    ) -> None:
        self._name = name
        self._generators = generators
        self._changing = changing
        self._modules = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._random: RandomState | None = RandomState(generators)
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
        self._contents = _Contents(self._modules)
        self._kernels = _attention_kernels()

    def end(self) -> None:
        """Forget what the call has left as it was.

        Raises
        ------
        ExecutionError
            If the call has changed a buffer that earlier calls left as it was, and that has not
            been copied.
        """
        if self._random is not None and not self._random.difference(RandomState(self._generators)):
            self._random = None
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
        random = None if self._random is None else RandomState(self._generators)
        now, kernels = self._contents.now(self._modules), _attention_kernels()
        buffers = [(buffers_of(one.module), one.name, buffers_of(one.module).get(one.name)) for one in self._buffers]
        parameters = [
            (parameters_of(part), key, parameters_of(part).get(key), then)
            for part, key, then, _ in self._parameters
            if _are_exchanged(parameters_of(part).get(key), then)
        ]
        try:
            if self._random is not None:
                self._random.restore()
            self._contents.put()
            for buffer in self._buffers:
                buffers_of(buffer.module)[buffer.name] = buffer.value()
            for held, key, _, then in parameters:
                held[key] = then
            _set_attention_kernels(self._kernels)
            yield
        finally:
            if random is not None:
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


_Holder = list[object] | dict[object, object] | set[object] | deque[object]


class _Contents:
    """The attributes of some modules, and the entries of containers and objects in them, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes: list[tuple[dict[str, object], dict[str, object]]] = []
        self._held: dict[int, tuple[_Holder, _Holder]] = {}
        for module in modules:
            own = {key: value for key, value in vars(module).items() if key not in _NOT_ATTRIBUTES}
            self._attributes.append((vars(module), own))
            for value in own.values():
                self._visit(value)

    def now(self, modules: Iterable[nn.Module]) -> _Contents:
        """Return the present contents of the same modules and containers."""
        found = _Contents(modules)
        for holder, _ in self._held.values():
            found._visit(holder)
        return found

    def _visit(self, value: object) -> None:
        if type(value) in _PLAIN or id(value) in self._held:
            return
        if isinstance(value, _HOLDERS):
            holder = cast("_Holder", value)
        elif _is_followed(cast("Hashable", type(value))):
            holder = cast("_Holder", vars_of(value))
        else:
            return
        self._held[id(value)] = (holder, holder.copy())
        for part in holder.values() if isinstance(holder, dict) else holder:
            self._visit(part)

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the contents."""
        values = [value for _, own in self._attributes for value in own.values()]
        for _, content in self._held.values():
            values += content.values() if isinstance(content, dict) else content
        return [value for value in values if isinstance(value, Tensor)]

    def put(self) -> None:
        """Put the contents back where they differ."""
        for current, own in self._attributes:
            for key in [key for key in current if key not in own and key not in _NOT_ATTRIBUTES]:
                del current[key]
            for key, value in own.items():
                if key not in current or current[key] is not value:
                    current[key] = value
        for holder, content in self._held.values():
            if _identity(holder) != _identity(content):
                holder.clear()
                holder.extend(content) if isinstance(holder, list | deque) else holder.update(content)  # type: ignore[arg-type]


_NOT_ATTRIBUTES = OF_EVERY_MODULE | {"forward", COMPILED_CALL}
"""The last two are replaced while a plan is followed."""
_PLAIN = (bool, int, float, str, bytes, type(None), Tensor, nn.Parameter)
_HOLDERS = (list, dict, set, deque)


@lru_cache(maxsize=1000)
def _is_followed(cls: type) -> bool:
    """Return whether objects of a class are the user's, and can be changed by a call."""
    if issubclass(cls, nn.Module | Tensor | type) or is_library(cls.__module__) or is_installed(cls):
        return False
    return cls.__dictoffset__ != 0


def _identity(holder: _Holder) -> object:
    """Return what identifies the entries of a container."""
    if isinstance(holder, dict):
        return [(id(key), id(value)) for key, value in holder.items()]
    return {*map(id, holder)} if isinstance(holder, set) else [*map(id, holder)]
