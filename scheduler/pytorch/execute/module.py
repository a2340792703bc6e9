"""The module that follows a plan, and the plans it keeps for other calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from scheduler.api import SolveOptions
from scheduler.errors import ExecutionError
from scheduler.plan import Plan
from scheduler.pytorch.capture.arguments import Signature, read_arguments
from scheduler.pytorch.execute.guards import Modes, call_key, describe_difference

OnMismatch = Literal["error", "plain", "plan"]


PLANNING: SolveOptions = {"time_limit": 20.0}
"""What planning before training takes by default; `solve` by itself takes longer."""


MOST_OTHER_PLANS = 8
"""Plans for other calls than the first that are kept; the one not used for longest goes first."""


class StepRunner(Protocol):
    """What runs the forward of a planned step."""

    def run(self, inputs: Sequence[Tensor]) -> object:
        """Run the forward on the distinct tensors of a call."""

    def difference(self) -> str:
        """Return what differs in the model since the plan was made, "" if nothing does."""


class CheckpointedModule(nn.Module):
    """A module that follows a plan; made by `checkpointed`.

    Its parameters and buffers are the original module's, under the same names, also in
    `state_dict`.

    Attributes
    ----------
    module : nn.Module
        The original.
    loss : callable or None
    plan : Plan or None
    others : OtherPlans or None
        The plans for other calls, with `on_mismatch="plan"`.
    """

    _runner: StepRunner

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        loss: Callable[..., Tensor] | None,
        on_mismatch: OnMismatch,
    ) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.plan: Plan | None = None
        self.on_mismatch = on_mismatch
        self.others: OtherPlans | None = None
        self.training = module.training
        self._key = call_key(*read_arguments(args, kwargs))
        self._modes = Modes(module)
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the forward of the plan; the backward of what it returns follows the plan too.

        Raises
        ------
        ExecutionError
            If the call differs from what was planned and `on_mismatch="error"`.
        CaptureError, BudgetTooSmallError
            If it differs and with `on_mismatch="plan"` no plan can be made for it.
        """
        if not torch.is_grad_enabled() or (not self.module.training and self._modes.root_trains):
            return self._plain(args, kwargs)
        signature, tensors = read_arguments(args, kwargs)
        difference = self._difference(signature, tensors)
        if difference:
            if self.on_mismatch == "plain":
                return self._plain(args, kwargs)
            if self.others is not None:
                return self.others.find(args, kwargs)._runner.run(tensors)
            raise ExecutionError(
                f"this call is not the one that was planned: {difference}. Make a plan for it with"
                ' on_mismatch="plan", or pass on_mismatch="plain" to run the model without a plan.'
            )
        return self._runner.run(tensors)

    def _plain(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        outputs = self.module(*args, **kwargs)
        return outputs if self.loss is None else self.loss(outputs)

    def _difference(self, signature: Signature, tensors: list[Tensor]) -> str:
        key = call_key(signature, tensors)
        if key != self._key:
            return describe_difference(key, self._key)
        return self._modes.difference() or self._runner.difference()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under their names in the original module."""
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield _joined(prefix, name), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers under their names in the original module."""
        for name, buffer in super().named_buffers("", recurse, remove_duplicate):
            yield _joined(prefix, name), buffer


class OtherPlans:
    """Plans of one model and budget for calls that the first plan does not cover.

    Attributes
    ----------
    modules : list of CheckpointedModule
        One for each plan, the one used last at the end.
    """

    def __init__(self, make: Callable[..., CheckpointedModule]) -> None:
        self.modules: list[CheckpointedModule] = []
        self._make = make

    def find(self, args: tuple[object, ...], kwargs: dict[str, object]) -> CheckpointedModule:
        """Return the module that covers a call, made now if there is none."""
        call = read_arguments(args, kwargs)
        found = next((module for module in self.modules if not module._difference(*call)), None)
        if found is None:
            found = self._make(args, kwargs)
        else:
            self.modules.remove(found)
        self.modules = [*self.modules, found][-MOST_OTHER_PLANS:]
        return found


def _joined(prefix: str, name: str) -> str:
    short = name.removeprefix("module.")
    return f"{prefix}.{short}" if prefix else short


def _drop_prefix(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
    """Name the entries of a state as the original module does."""
    inner = f"{prefix}module."
    for name in [name for name in state if name.startswith(inner)]:
        state[prefix + name.removeprefix(inner)] = state.pop(name)


def _add_prefix(module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    """Find the entries of the original module's state."""
    for name in [name for name in state if name.startswith(prefix)]:
        if not name.startswith(f"{prefix}loss."):
            state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)
