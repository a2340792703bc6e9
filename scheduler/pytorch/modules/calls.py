"""A training step as a tree of module calls: what each call takes, saves and holds.

The forward of a step is divided into segments. A segment is the code that one call runs by
itself between two inner calls, or before the first, or after the last; a call that makes no inner
calls is one segment. Segments are numbered in the order in which they run, and the backward
visits them in the opposite order. The loss, and everything else outside the model, belongs
to no call.

Everything is counted by storages, each once. Storages of parameters, buffers and the
arguments of the step are resident, and are not among the storages here.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.graph import Tensor
from scheduler.graph.decisions import Decision, Span, span_layer

OUTSIDE = -1
"""The position of the caller where there is none: the step itself."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a module, which may be recomputed as a whole.

    The calls of consecutive children of an `nn.Sequential` count as a call too, a span: it is made
    in the call of the Sequential or in a larger span, and the children are called in it.

    Attributes
    ----------
    module : str
        Qualified name of the module, "" for the model itself.
    number : int
        How many calls of the same module came before it in the step.
    caller : int
        Position of the call in whose code it is made, or `OUTSIDE`; always a smaller one.
    start, stop : int
        It runs the segments from `start` up to, but not including, `stop`.
    inputs : tuple of int
        Storages of its arguments. If the call is recomputed, they are held until its backward has ended.
    copied_bytes : int
        Bytes of the buffers and random states that recomputing it copies, held as the inputs are.
    refusal : str
        Why it cannot be recomputed, "" if it can.
    span : tuple of int
        The positions of the children of the module that are called, as `range` takes them; () if
        this is the call of the module itself.
    """

    module: str
    number: int
    caller: int
    start: int
    stop: int
    inputs: tuple[int, ...] = ()
    copied_bytes: int = 0
    refusal: str = ""
    span: Span = ()

    @property
    def name(self) -> str:
        """The name of the module, with a span, and the number of the call if it is not 0: "a.0", "a.0#1", "a[3:7]"."""
        return span_layer(self.module, self.span) + (f"#{self.number}" if self.number else "")

    def decision(self, *, keeps_expensive: bool = False) -> Decision:
        """Return the decision to recompute it."""
        return Decision(self.module, self.number, keeps_expensive, self.span)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A storage that the forward allocates.

    Attributes
    ----------
    size_bytes : int
    born : int
        The segment that allocates it.
    dies : int
        The last segment during which Python refers to it, in a forward that saves nothing for
        the backward; the number of segments if it is held to the end.
    read_by : tuple of int
        Segments whose forward reads it.
    saved_by : tuple of int
        Segments whose operations save it for their backward.
    """

    size_bytes: int
    born: int
    dies: int
    read_by: tuple[int, ...] = ()
    saved_by: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The code that a call runs between two inner calls, and its backward.

    Attributes
    ----------
    call : int
        Position of the call, or `OUTSIDE`.
    forward_time, backward_time : float
        Seconds.
    forward_peak_bytes : int
        Most bytes allocated at once by one run of its forward that saves nothing, above those
        live at its start.
    saving_forward_peak_bytes : int
        The same for a run that saves everything that its backward needs.
    keeping_forward_peak_bytes : int
        The same for a run that saves nothing, but keeps the results of its expensive operators.
    kept_forward_peak_bytes : int
        The same for a later run that saves everything and uses the kept results, which are live at its start.
    backward_peak_bytes : int
        Most bytes at once during its backward, above those live at its start (when all that it
        saved is live).
    gradient_bytes : int
        Bytes of the gradients of activations that are live once its backward has ended.
    parameter_gradient_bytes : int
        Bytes of the gradients of parameters that its backward is the first to allocate.
    expensive : tuple of int
        Storages, allocated here, of the results of its expensive operators.
    expensive_time : float
        Seconds of these operators, part of `forward_time`.
    """

    call: int
    forward_time: float = 0.0
    backward_time: float = 0.0
    forward_peak_bytes: int = 0
    saving_forward_peak_bytes: int = 0
    keeping_forward_peak_bytes: int = 0
    kept_forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    gradient_bytes: int = 0
    parameter_gradient_bytes: int = 0
    expensive: tuple[int, ...] = ()
    expensive_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CallTree:
    """One training step, measured call by call.

    Attributes
    ----------
    calls : tuple of Call
        A call comes before the calls that it makes.
    segments : tuple of Segment
    storages : tuple of Storage
    resident : tuple of Tensor
        Parameters, buffers, arguments, existing gradients, the optimizer's state, the reserve.
    name : str
        Of the model.
    """

    calls: tuple[Call, ...]
    segments: tuple[Segment, ...]
    storages: tuple[Storage, ...]
    resident: tuple[Tensor, ...]
    name: str = ""

    @property
    def resident_bytes(self) -> int:
        """The bytes of the resident tensors, each storage once."""
        sizes: dict[str | None, int] = {}
        for tensor in self.resident:
            sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), tensor.size_bytes)
        return sum(sizes.values())

    def callers(self, segment: int) -> list[int]:
        """Return the calls around a segment, the innermost first."""
        found, call = [], self.segments[segment].call
        while call != OUTSIDE:
            found.append(call)
            call = self.calls[call].caller
        return found
