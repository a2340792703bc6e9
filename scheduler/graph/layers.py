"""Layers: the costs of running one forward and backward, with saving and without."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import cast

from scheduler.errors import InvalidGraphError
from scheduler.validation import check_name, count_of, instances, set_field, time_of


@dataclass(frozen=True, slots=True)
class Mode:
    """A further way to run a layer, which trades saved bytes against time differently.

    Parameters
    ----------
    forward_time, backward_time : float
        In the chain's `time_unit`.
    saved_bytes : int
        Bytes saved for the backward, beyond the layer's input and output.
    forward_workspace_bytes, backward_workspace_bytes : int
        Bytes that exist only while the forward or the backward runs.

    Raises
    ------
    InvalidGraphError
        If a number is negative or not finite.
    """

    forward_time: float
    backward_time: float
    saved_bytes: int
    _: KW_ONLY
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self, "a mode")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, with the costs of its forward (with saving and without) and of its backward.

    Parameters
    ----------
    name : str
        Unique within a chain.
    forward_time, backward_time : float
        In the chain's `time_unit`; the forward is the one that saves.
    output_bytes : int
    saved_bytes : int
        Bytes that autograd saves for the backward, beyond the layer's input and output.
    gradient_bytes : int, optional
        Bytes of the output's gradient; by default as many as the output has. Use 0 for
        integer state.
    parameter_bytes, parameter_gradient_bytes : int
    keeps_input, keeps_output : bool
        Whether autograd keeps the layer's input, and its output.
    forward_without_saving_time : float, optional
        By default `forward_time`.
    forward_without_saving_workspace_bytes : int
    forward_with_saving_workspace_bytes : int
    backward_workspace_bytes : int
        Bytes that exist only while the operation runs.
    modes : iterable of Mode
        Further ways to run the layer with saving.

    Raises
    ------
    InvalidGraphError
        If a number is negative or not finite, or a field has the wrong type.

    Examples
    --------
    >>> layer = Layer("mlp", 1.0, 2.0, output_bytes=100, saved_bytes=400)
    >>> layer.gradient_bytes
    100
    """

    name: str
    forward_time: float
    backward_time: float
    output_bytes: int
    saved_bytes: int
    _: KW_ONLY
    gradient_bytes: int = cast(int, None)
    parameter_bytes: int = 0
    parameter_gradient_bytes: int = 0
    keeps_input: bool = True
    keeps_output: bool = False
    forward_without_saving_time: float = cast(float, None)
    forward_without_saving_workspace_bytes: int = 0
    forward_with_saving_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    modes: tuple[Mode, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "a layer")
        if self.gradient_bytes is None:
            set_field(self, "gradient_bytes", self.output_bytes)
        if self.forward_without_saving_time is None:
            set_field(self, "forward_without_saving_time", self.forward_time)
        where = f'layer "{self.name}"'
        _check_numbers(self, where)
        for name in ("keeps_input", "keeps_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidGraphError(f"{name} of {where} must be a bool, got {getattr(self, name)!r}")
        set_field(self, "modes", instances(self.modes, Mode, f"modes of {where}"))

    @property
    def all_modes(self) -> tuple[Mode, ...]:
        """All ways to run the layer with saving, its own first."""
        own = Mode(
            self.forward_time,
            self.backward_time,
            self.saved_bytes,
            forward_workspace_bytes=self.forward_with_saving_workspace_bytes,
            backward_workspace_bytes=self.backward_workspace_bytes,
        )
        return (own, *self.modes)


def _check_numbers(value: Layer | Mode, where: str) -> None:
    for field in fields(value):
        if field.name.endswith("_bytes"):
            set_field(value, field.name, count_of(getattr(value, field.name), f"{field.name} of {where}"))
        elif field.name.endswith("_time"):
            set_field(value, field.name, time_of(getattr(value, field.name), f"{field.name} of {where}"))
