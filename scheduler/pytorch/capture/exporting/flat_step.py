"""A training step in the form that AOTAutograd exports: a module whose inputs are distinct tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.arguments import Signature, fill_arguments, flatten
from scheduler.pytorch.capture.held_tensors import HeldTensor
from scheduler.pytorch.capture.joint import TENSOR, Source, SourceKind
from scheduler.pytorch.guards.read_names import ReadNames
from scheduler.pytorch.guards.tensors import TensorPlace, find_tensors
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.modules import buffers_of, with_tensors
from scheduler.pytorch.torch_private.tensors import storage_id


class ModuleWithLoss(nn.Module):
    """A module followed by its loss, if there is one."""

    def __init__(self, module: nn.Module, loss: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.training = module.training

    @functools.cached_property
    def read(self) -> ReadNames:
        """The names that the code of the two mentions."""
        return ReadNames(self.module, self.loss)

    @functools.cached_property
    def places(self) -> list[TensorPlace]:
        """Where they find tensors other than by their registered names."""
        return [*find_tensors(self.module, self.loss, self.read)]

    def forward(self, *args: object, **kwargs: object) -> object:
        outputs = self.module(*args, **kwargs)
        return outputs if self.loss is None else self.loss(outputs)


@dataclass(frozen=True)
class StepForm:
    """What the inputs and outputs of an exported step are.

    Attributes
    ----------
    sources, output_spec, output_leaves, signature
        As of `FlatStep`.
    """

    sources: Mapping[str, Source]
    output_spec: pytree.TreeSpec
    output_leaves: tuple[object, ...]
    signature: Signature


class FlatStep(nn.Module):
    """A step that is called with its distinct input tensors and holds its distinct other tensors.

    Every distinct parameter and buffer enters once, however many names it has, so that the
    gradients of tied weights are added inside the graph, in autograd's order. The tensors are
    attributes `t0`, `t1`, ... of this module; while it runs, they are in the places that they
    came from.

    Parameters
    ----------
    core : nn.Module
        The model with its loss, or the module that TorchDynamo captured of both.
    signature : Signature
        The structure of the arguments.
    held : sequence of HeldTensor
        What the step reads besides registered tensors and arguments.

    Attributes
    ----------
    sources : dict of str to Source
        Where the tensor of each attribute comes from.
    output_spec, output_leaves
        Structure of the outputs of the latest run, and their leaves with `TENSOR` for each tensor.
    copied_outputs : list of int
        Positions of the outputs of the latest run that are copies of those of `core`.
    """

    def __init__(self, core: nn.Module, signature: Signature, held: Sequence[HeldTensor]) -> None:
        super().__init__()
        self.__dict__["core"] = core  # not registered: the tensors belong to this module now
        self.signature = signature
        self.sources: dict[str, Source] = {}
        self.output_spec: pytree.TreeSpec | None = None
        self.output_leaves: tuple[object, ...] = ()
        self.copied_outputs: list[int] = []
        self._attributes: dict[str, str] = {}
        """Attribute of this module for each qualified name in `core`."""
        self._places: list[tuple[TensorPlace, str]] = []
        """Where each attribute belongs besides the registered names."""
        self._replaced: set[str] = set()
        """Attributes of constants in whose place forward puts another tensor."""
        self._adopt("parameter", core.named_parameters(remove_duplicate=False))
        self._adopt("buffer", core.named_buffers(remove_duplicate=False))
        self._adopt_held(held)

    @property
    def form(self) -> StepForm:
        """What the inputs and outputs are, after the first run."""
        assert self.output_spec is not None
        return StepForm(self.sources, self.output_spec, self.output_leaves, self.signature)

    def _adopt(self, kind: SourceKind, found: Iterable[tuple[str, Tensor]]) -> None:
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name, tensor in found:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        for key, tensor in tensors.items():
            attribute = f"t{len(self.sources)}"
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(attribute, tensor)
            else:
                self.register_buffer(attribute, tensor)
            short = tuple(name.removeprefix("module.") for name in names[key])
            self.sources[attribute] = Source(kind, short, tuple(names[key]))
            self._attributes.update(dict.fromkeys(names[key], attribute))

    def _adopt_held(self, held: Sequence[HeldTensor]) -> None:
        registered = {id(getattr(self, attribute)): attribute for attribute in self.sources}
        taken = {name for source in self.sources.values() for name in source.names}
        for found in held:
            attribute = registered.get(id(found.tensor), f"t{len(self.sources)}")
            if attribute not in self.sources:
                if isinstance(found.tensor, nn.Parameter):
                    self.register_parameter(attribute, found.tensor)
                else:
                    self.register_buffer(attribute, found.tensor)
                first, *others = (place.name for place in found.places)
                self.sources[attribute] = Source("constant", (_distinct(first, taken), *others))
            reads = tuple(place.get for place in found.places)
            self.sources[attribute] = replace(self.sources[attribute], reads=reads)
            self._places += [(place, attribute) for place in found.places]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        args, kwargs = fill_arguments(self.signature, tensors)
        own = {name: getattr(self, attribute) for name, attribute in self._attributes.items()}
        outputs = self._run_core(args, kwargs, own)
        flat, self.output_spec = flatten(outputs)
        self.output_leaves = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat)
        returned = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        separate = _without_shared_gradients(returned, [*own.values(), *tensors])
        self.copied_outputs = [i for i, output in enumerate(separate) if output is not returned[i]]
        return separate

    def _run_core(self, args: tuple[object, ...], kwargs: dict[str, object], own: dict[str, Tensor]) -> object:
        """Run `core` with our tensors in place of its parameters, buffers and constants."""
        core: nn.Module = self.__dict__["core"]
        with contextlib.ExitStack() as stack:
            for place, attribute in self._places:
                stack.callback(place.put(getattr(self, attribute)))
            stack.enter_context(with_tensors(core, own))
            outputs = core(*args, **kwargs)
            _copy_replaced_buffers(core, own)
            self._replaced.update(
                attribute for place, attribute in self._places if not place.holds(getattr(self, attribute))
            )
        return outputs

    def constants_read_and_replaced(self, exported: fx.GraphModule) -> list[str]:
        """Return the names of constants that the exported step reads although forward replaces them."""
        placeholders = exported.graph.find_nodes(op="placeholder")
        read = {getattr(node.meta["desc"], "target", None) for node in placeholders if node.users}
        return [self.sources[attribute].names[0] for attribute in sorted(self._replaced & read)]


def _distinct(name: str, taken: set[str]) -> str:
    """Return a name, with a number if it is taken."""
    number, distinct = 1, name
    while distinct in taken:
        number += 1
        distinct = f"{name} ({number})"
    taken.add(distinct)
    return distinct


def _copy_replaced_buffers(core: nn.Module, own: dict[str, Tensor]) -> None:
    """Turn the assignment of a new tensor to a buffer into a change of the old one."""
    for name, tensor in own.items():
        path, _, key = name.rpartition(".")
        current = buffers_of(core.get_submodule(path)).get(key)
        if current is not None and current is not tensor and not isinstance(tensor, nn.Parameter):
            if current.shape != tensor.shape or current.dtype != tensor.dtype:
                raise CaptureError(f'buffer "{name}" is replaced by a tensor of another shape or dtype in forward')
            with torch.no_grad():
                tensor.copy_(current)


def _without_shared_gradients(outputs: Sequence[Tensor], held: Sequence[Tensor]) -> list[Tensor]:
    """Copy outputs that require a gradient and share a storage with another output or an input.

    An autograd function cannot return them: gradients would have to flow from one to the other.
    """
    taken = {storage_id(tensor.untyped_storage()) for tensor in held}
    result = []
    for output in outputs:
        storage = storage_id(output.untyped_storage())
        if output.requires_grad:
            if storage in taken:
                output = output.clone()
            taken.add(storage)
        result.append(output)
    return result
