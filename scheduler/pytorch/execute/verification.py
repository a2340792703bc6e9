"""Compare the planned step with the plain one: outputs, gradients, buffers and random states, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from scheduler.pytorch.capture.arguments import fill_arguments, flatten, flatten_with_paths, read_arguments
from scheduler.pytorch.capture.kept_state import RandomState, State
from scheduler.pytorch.execute.first_difference import Recording, first_difference
from scheduler.pytorch.guards.outside_states import OutsideState
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.tensors import version_of

Run = Callable[[tuple[object, ...], dict[str, object]], object]
"""Runs a forward on args and kwargs."""

MOST_SHOWN = 10
"""Number of differences that a summary lists."""


@dataclass(frozen=True)
class Difference:
    """A value that is not the same after the planned step as after the plain one.

    Attributes
    ----------
    name : str
        For example "loss", "gradient of 0.weight", "buffer norm.running_mean".
    largest : float or None
        Largest absolute difference of two entries; None if the values cannot be subtracted.
    relative : float or None
        The same, divided by the largest absolute entry of the plain value.
    reason : str
        What differs where it is not a matter of entries: "its shape is (2,), plain (3,)".
    repeats : bool
        Whether two plain steps agree in it. If they do not, the model itself is not
        deterministic, and the difference says nothing about the plan.
    """

    name: str
    largest: float | None = None
    relative: float | None = None
    reason: str = ""
    repeats: bool = True

    def __str__(self) -> str:
        text = self.reason or f"differs by up to {self.largest:.3g} ({self.relative:.3g} of the largest entry)"
        return f"{self.name}: {text}" + ("" if self.repeats else "; two plain steps differ in it too")


@dataclass(frozen=True)
class Verification:
    """How a planned step compares with the plain one.

    Attributes
    ----------
    differences : tuple of Difference
        In the order of the step: outputs, arguments and buffers, gradients as the backward
        computes them, random state. Empty if the steps are equal bit for bit.
    first : str
        The first operation of the plain step whose result the planned step does not compute,
        with its module and the line of the user's code; "" if it cannot be told.
    gradients, buffers : int
        The number of gradients and buffers that were compared.
    has_loss : bool
        Whether the step ends with a loss, rather than with outputs.
    outputs : object
        What the planned step returned: the detached loss, or the outputs.
    """

    differences: tuple[Difference, ...]
    first: str
    gradients: int
    buffers: int
    has_loss: bool
    outputs: object = field(default=None, repr=False, compare=False)

    @property
    def is_equal(self) -> bool:
        """Whether everything is equal bit for bit."""
        return not self.differences

    @property
    def is_trusted(self) -> bool:
        """Whether the steps differ only where two plain steps differ too."""
        return not any(difference.repeats for difference in self.differences)

    def __repr__(self) -> str:
        if self.is_equal:
            first = "loss" if self.has_loss else "outputs"
            compared = f"{first}, {self.gradients} gradients, {self.buffers} buffers, random state"
            return f"the planned step equals the plain one: {compared}"
        others = len(self.differences) - 1
        more = f", and {others} other value{'s' * (others > 1)}" if others else ""
        return f"the planned step differs from the plain one: {self.differences[0]}{more}"

    def summary(self) -> str:
        """Return the result with one line for each difference, and the first operation that differs."""
        if self.is_equal:
            return repr(self)
        lines = ["the planned step differs from the plain one:"]
        lines += [f"  {difference}" for difference in self.differences[:MOST_SHOWN]]
        if len(self.differences) > MOST_SHOWN:
            lines.append(f"  and {len(self.differences) - MOST_SHOWN} others")
        if self.first:
            lines.append(f"The first operation that differs is {self.first}.")
        if self.is_trusted:
            lines.append("The model is not deterministic: torch.use_deterministic_algorithms(True) may make it so.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return the result as plain JSON data."""
        return {
            "is_equal": self.is_equal,
            "gradients": self.gradients,
            "buffers": self.buffers,
            "first": self.first,
            "differences": [
                {
                    "name": one.name,
                    "largest": _finite(one.largest),
                    "relative": _finite(one.relative),
                    "reason": one.reason,
                    "repeats": one.repeats,
                }
                for one in self.differences
            ],
        }


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


class Comparison:
    """Runs a step plainly and as planned on the same arguments, and leaves everything as it was.

    Gradients are computed, but not accumulated: existing ones stay, and no hook that waits for
    an accumulated gradient runs. If the step returns more than one number, the incoming gradients are random.

    Parameters
    ----------
    module : nn.Module
        The planned module, under whose names parameters and buffers are reported.
    args, kwargs
        The arguments of the call.
    trained : mapping of str to Tensor
        Everything but the arguments that gets a gradient, by name.
    held : iterable of Tensor
        Tensors that the step may change, in addition to those of the module and the arguments.
    generators : sequence of OutsideState
        Generators of the user that the step draws from.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        trained: Mapping[str, Tensor],
        *,
        held: Iterable[Tensor],
        generators: Sequence[OutsideState] = (),
    ) -> None:
        self._module = module
        self._signature, self._tensors = read_arguments(args, kwargs)
        self._trained = trained
        self._generators = generators
        self._state = State([module], [*self._tensors, *held], self._generators)

    def verify(self, plain: Run, planned: Run) -> Verification:
        """Return how two ways to run the forward, and the backward of what they return, compare."""
        one, other = self._record(plain), self._record(planned)
        differences = one.differences(other)
        first = ""
        if differences:
            unsteady = {difference.name for difference in one.differences(self._record(plain))}
            differences = [
                Difference(d.name, d.largest, d.relative, d.reason, repeats=d.name not in unsteady) for d in differences
            ]
            first = self._first_difference(plain, planned)
        return Verification(
            differences=tuple(differences),
            first=first,
            gradients=sum(value is not None for value in one.gradients.values()),
            buffers=len(one.buffers),
            has_loss="loss" in one.outputs,
        )

    def _record(self, run: Run) -> _Record:
        inputs = [_separate(tensor) for tensor in self._tensors]
        versions = {name: version_of(parameter) for name, parameter in self._module.named_parameters()}
        try:
            outputs = run(*fill_arguments(self._signature, inputs))
            gradients = self._gradients(outputs, inputs)
            return _Record(
                outputs=_named_outputs(outputs),
                arguments={f"argument tensor {i}": _copied(tensor) for i, tensor in enumerate(inputs)},
                buffers={f"buffer {name}": _copied(buffer) for name, buffer in self._module.named_buffers()},
                parameters={
                    f"parameter {name}": _copied(parameter)
                    for name, parameter in self._module.named_parameters()
                    if version_of(parameter) != versions.get(name)
                },
                gradients=gradients,
                random=RandomState(self._generators),
            )
        finally:
            self._state.restore()

    def _gradients(self, outputs: object, inputs: Sequence[Tensor]) -> dict[str, object]:
        """Return the gradients by name, in about the order in which the backward computes them."""
        targets = {f"gradient of {name}": tensor for name, tensor in reversed([*self._trained.items()])}
        targets |= {f"gradient of argument tensor {i}": x for i, x in enumerate(inputs) if x.requires_grad}
        roots = [leaf for leaf in flatten(outputs)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not roots or not targets:
            return {}
        incoming = [
            torch.ones_like(root) if _is_loss(outputs) else _random_like(root, i) for i, root in enumerate(roots)
        ]
        found = torch.autograd.grad(roots, [*targets.values()], incoming, allow_unused=True)
        return {name: None if one is None else _copied(one) for name, one in zip(targets, found, strict=True)}

    def _first_difference(self, plain: Run, planned: Run) -> str:
        """Run both ways once more and return the first operation of the plain one that differs."""

        def step(run: Run) -> Recording:
            inputs = [_separate(tensor) for tensor in self._tensors]
            held = [*inputs, *self._module.parameters(), *self._module.buffers(), *self._trained.values()]
            recording = Recording(self._module, held)
            try:
                with recording:
                    outputs = run(*fill_arguments(self._signature, inputs))
                    recording.begin_backward()
                    self._gradients(outputs, inputs)
                return recording
            finally:
                self._state.restore()

        return first_difference(step(plain), step(planned))


@dataclass(frozen=True)
class _Record:
    """What a step computed and left behind, by name, on the CPU."""

    outputs: dict[str, object]
    arguments: dict[str, object]
    buffers: dict[str, object]
    parameters: dict[str, object]
    gradients: dict[str, object]
    random: RandomState

    def differences(self, other: _Record) -> list[Difference]:
        """Return what differs in another record, in the order of the step."""
        found: list[Difference] = []
        for kind in ("outputs", "arguments", "buffers", "parameters", "gradients"):
            mine: dict[str, object] = getattr(self, kind)
            theirs: dict[str, object] = getattr(other, kind)
            compared = (_difference(name, mine.get(name), theirs.get(name)) for name in {**mine, **theirs})
            found += [difference for difference in compared if difference]
        if name := self.random.difference(other.random):
            found.append(Difference(name, reason="is in another state"))
        return found


def _difference(name: str, plain: object, planned: object) -> Difference | None:
    if not isinstance(plain, Tensor) or not isinstance(planned, Tensor):
        is_same = type(plain) is type(planned) and not isinstance(plain, Tensor) and bool(plain == planned)
        if is_same or (plain is planned):
            return None
        return Difference(name, reason=f"is {_show(planned)}, plain {_show(plain)}")
    for text, now, then in (
        ("shape", tuple(planned.shape), tuple(plain.shape)),
        ("dtype", planned.dtype, plain.dtype),
    ):
        if now != then:
            return Difference(name, reason=f"its {text} is {now}, plain {then}")
    one, other = (tensor.to_dense() if tensor.layout is not torch.strided else tensor for tensor in (plain, planned))
    if torch.equal(one, other):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    if torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True):
        return None
    largest, scale = float((one - other).abs().max()), float(one.abs().max())
    return Difference(name, largest, largest / scale if scale else math.inf)


def _show(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _named_outputs(outputs: object) -> dict[str, object]:
    if isinstance(outputs, Tensor) and _is_loss(outputs):
        return {"loss": _copied(outputs)}
    leaves, spec = flatten_with_paths(outputs)
    named: dict[str, object] = {"structure of the outputs": str(spec)}
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            named[f"output{pytree.keystr(path)}"] = _copied(leaf)
        elif isinstance(leaf, bool | int | float | str):
            named[f"output{pytree.keystr(path)}"] = leaf
    return named


def _is_loss(outputs: object) -> bool:
    return isinstance(outputs, Tensor) and outputs.numel() == 1 and outputs.requires_grad


def _separate(tensor: Tensor) -> Tensor:
    """Return the same tensor without the graph that computed it, as a leaf that gets its own gradient."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU: the memory of the device is for the step."""
    return tensor.detach().to("cpu", copy=True)


def _random_like(tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device, tensor.dtype)
