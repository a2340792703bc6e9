"""The module that follows a plan, and the plans that it keeps for other calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn

from scheduler.errors import ExecutionError
from scheduler.plan import Plan
from scheduler.pytorch.capture.arguments import Signature, read_arguments
from scheduler.pytorch.execute.guards import Modes, call_key

OnMismatch = Literal["error", "plain", "plan"]

MOST_OTHER_PLANS = 8
"""Number of plans kept for calls other than the first; the least recently used is dropped first."""


class StepRunner(Protocol):
    """Runs the forward of a planned step."""

    def run(self, inputs: Sequence[Tensor]) -> object:
        """Run the forward on the distinct tensors of a call."""

    def difference(self) -> str:
        """Return what differs in the model since the plan was made, "" if nothing does."""


class ModuleSettings(TypedDict, total=False):
    """Keyword options of a planned module, all optional: `loss` and `on_mismatch` as for `checkpointed`.

    `plan` is the plan that the module follows, if there is one. `others` are the plans for other
    calls; `on_mismatch="plan"` needs it.
    """

    loss: Callable[..., Tensor] | None
    on_mismatch: OnMismatch
    plan: Plan | None
    others: OtherPlans | None


class CheckpointedModule(nn.Module):
    """A module that follows a plan; returned by `checkpointed`.

    Its parameters and buffers are the original module's, under the same names, also in
    `state_dict`. Subclasses set `runner`, which runs the planned step.

    Attributes
    ----------
    module : nn.Module
        The original.
    loss : callable or None
    plan : Plan or None
    on_mismatch : "error", "plain" or "plan"
    others : OtherPlans or None
        The plans for other calls, with `on_mismatch="plan"`.
    runner : StepRunner
    """

    runner: StepRunner

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        **settings: Unpack[ModuleSettings],
    ) -> None:
        super().__init__()
        self.module = module
        self.loss = settings.get("loss")
        self.plan = settings.get("plan")
        self.on_mismatch = settings.get("on_mismatch", "error")
        self.others = settings.get("others")
        self.training = module.training
        self.planned_call = call_key(*read_arguments(args, kwargs))
        self.modes = Modes(module)
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the forward of the plan; the backward of what it returns follows the plan too.

        Raises
        ------
        ExecutionError
            If the call differs from the planned one and `on_mismatch="error"`.
        CaptureError, BudgetTooSmallError
            If it differs, `on_mismatch="plan"`, and no plan can be made for it.
        """
        if not torch.is_grad_enabled() or (not self.module.training and self.modes.root_trains):
            return self.run_plain(args, kwargs)
        signature, tensors = read_arguments(args, kwargs)
        difference = self.difference(signature, tensors)
        if not difference:
            return self.runner.run(tensors)
        if self.on_mismatch == "plain":
            return self.run_plain(args, kwargs)
        if self.others is not None:
            return self.others.find(args, kwargs).runner.run(tensors)
        raise ExecutionError(
            f'this call differs from the planned one: {difference}. Pass on_mismatch="plan" to make a plan for it,'
            ' or on_mismatch="plain" to run the model without a plan.'
        )

    def run_plain(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run the model and its loss without a plan."""
        outputs = self.module(*args, **kwargs)
        return outputs if self.loss is None else self.loss(outputs)

    def difference(self, signature: Signature, tensors: Sequence[Tensor]) -> str:
        """Return the first difference between a call, or the model now, and the plan; "" if there is none."""
        differs = call_key(signature, tensors).difference(self.planned_call)
        return differs or self.modes.difference() or self.runner.difference()

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

    Parameters
    ----------
    make : callable
        Takes args and kwargs of a call and returns a module with a plan for it.

    Attributes
    ----------
    modules : list of CheckpointedModule
        One for each plan, the most recently used last.
    """

    def __init__(self, make: Callable[[Sequence[object], Mapping[str, object]], CheckpointedModule]) -> None:
        self.modules: list[CheckpointedModule] = []
        self._make = make

    def find(self, args: Sequence[object], kwargs: Mapping[str, object]) -> CheckpointedModule:
        """Return the module that covers a call; if there is none, make one."""
        call = read_arguments(args, kwargs)
        found = next((module for module in self.modules if not module.difference(*call)), None)
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
    """Rename the entries of a state to their names in the original module."""
    inner = f"{prefix}module."
    for name in [name for name in state if name.startswith(inner)]:
        state[prefix + name.removeprefix(inner)] = state.pop(name)


def _add_prefix(module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    """Rename the entries of the original module's state to their names in this module."""
    for name in [name for name in state if name.startswith(prefix)]:
        if not name.startswith(f"{prefix}loss."):
            state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)
