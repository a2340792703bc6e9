"""The module that follows a plan, and the plans that it keeps for other calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn

from scheduler.errors import ExecutionError, InvalidOptionError
from scheduler.plan import Plan
from scheduler.pytorch.capture.arguments import Signature, read_arguments
from scheduler.pytorch.capture.joint import Condition
from scheduler.pytorch.execute.guards import CallKey, Modes, call_key
from scheduler.pytorch.execute.verification import Comparison, Verification
from scheduler.pytorch.guards.outside_states import OutsideStates
from scheduler.pytorch.guards.read_names import ReadNames
from scheduler.pytorch.torch_private.autograd import is_transformed
from scheduler.pytorch.torch_private.modules import BUFFERS, MODULES, PARAMETERS

OnMismatch = Literal["error", "plain", "plan"]

MAX_SHAPES = 32
"""Number of plans that a module keeps by default."""


class StepRunner(Protocol):
    """Runs the forward of a planned step."""

    def run(self, inputs: Sequence[Tensor]) -> object:
        """Run the forward on the distinct tensors of a call."""

    def difference(self) -> str:
        """Return what differs in the model since the plan was made, "" if nothing does."""

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors that the step reads and that are neither arguments nor registered, by name."""


class ModuleSettings(TypedDict, total=False):
    """Keyword options of a planned module, all optional: `loss` and `on_mismatch` as for `checkpointed`.

    `plan` is the plan that the module follows, if there is one. `others` are the plans for other
    calls; `on_mismatch="plan"` needs it. `verify` as for `checkpointed`.
    """

    loss: Callable[..., Tensor] | None
    on_mismatch: OnMismatch
    plan: Plan | None
    others: OtherPlans | None
    verify: bool


class CheckpointedModule(nn.Module):
    """A module that follows a plan; returned by `checkpointed`.

    Its parameters and buffers are the original module's, under the same names, also in
    `state_dict`. Subclasses say how a planned step runs (`run_planned`). It cannot be copied or
    pickled, because it holds code and places of tensors: copy or save the original.

    Attributes
    ----------
    module : nn.Module
        The original.
    loss : callable or None
    plan : Plan or None
    on_mismatch : "error", "plain" or "plan"
    others : OtherPlans or None
        The plans for other calls, with `on_mismatch="plan"`.
    conditions : tuple of Condition
        On the values of the arguments: the plan is for calls for which they hold.
    """

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
        self._is_unverified = settings.get("verify", False)
        self.training = module.training
        self.planned_call = call_key(*read_arguments(args, kwargs))
        self.modes = Modes(module)
        self.conditions: tuple[Condition, ...] = ()
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the forward of the plan; the backward of what it returns follows the plan too.

        Raises
        ------
        ExecutionError
            If the call differs from the planned one and `on_mismatch="error"`, if it is inside a
            transform of torch.func, or if `verify=True` finds a difference from the plain step.
        CaptureError, BudgetTooSmallError
            If it differs, `on_mismatch="plan"`, and no plan can be made for it.
        """
        if self._runs_plain():
            return self.run_plain(args, kwargs)
        signature, tensors = read_arguments(args, kwargs)
        found = self._find(args, kwargs, signature, tensors)
        if found is None:
            return self.run_plain(args, kwargs)
        if found._is_unverified:
            found._verify_first(args, kwargs)
        return found.run_planned(args, kwargs, tensors)

    def _runs_plain(self) -> bool:
        """Return whether no call follows a plan now: in evaluation and without gradients."""
        return not torch.is_grad_enabled() or (not self.module.training and self.modes.root_trains)

    def _find(
        self, args: tuple[object, ...], kwargs: dict[str, object], signature: Signature, tensors: Sequence[Tensor]
    ) -> CheckpointedModule | None:
        """Return the module whose plan covers a call, None if the call runs without a plan."""
        if is_transformed():
            if self.on_mismatch == "plain":
                return None
            raise ExecutionError(
                "a planned step cannot run inside a transform of torch.func (grad, vmap, jvp) or under forward-mode"
                ' AD: transform the original, which is in the attribute "module", or pass on_mismatch="plain"'
            )
        call = call_key(signature, tensors)
        difference = self.difference(call, tensors)
        if not difference:
            return self
        if self.on_mismatch == "plain":
            return None
        if self.others is not None:
            return self.others.find(call, tensors, args, kwargs)
        raise ExecutionError(
            f'this call differs from the planned one: {difference}. Pass on_mismatch="plan" to make a plan for it,'
            ' or on_mismatch="plain" to run the model without a plan.'
        )

    def plan_call(self, *args: object, **kwargs: object) -> Plan:
        """Return the plan for a call, and make it if there is none; nothing is run.

        Parameters
        ----------
        *args, **kwargs
            The arguments of a call.

        Raises
        ------
        ExecutionError
            If the call runs without a plan, and as for a call.
        CaptureError, BudgetTooSmallError
            As for a call.
        """
        plan = self._find_planned("plan", args, kwargs).plan
        assert plan is not None
        return plan

    def verify(self, *args: object, **kwargs: object) -> Verification:
        """Run a step plainly and as planned, compare the two, and then run the planned step.

        Loss or outputs, gradients, buffers and random states are compared bit for bit; the model
        is put back after each run. In the end it is left as one planned step leaves it: with a
        loss, or a model that returns one number, gradients have been accumulated; otherwise only
        the forward has run, and its outputs are in the result. Verifying needs the memory of a step without a plan, and
        takes the time of at least three steps.

        Parameters
        ----------
        *args, **kwargs
            The arguments of a call.

        Returns
        -------
        Verification
            Says which values differ, how far, and the first operation that differs where it can
            be told.

        Raises
        ------
        ExecutionError
            If the call runs without a plan, and as for a call.
        CaptureError, BudgetTooSmallError
            As for a call.
        """
        found = self._find_planned("verify", args, kwargs)
        verification = found._compare(args, kwargs)
        outputs = found.run_planned(args, kwargs, read_arguments(args, kwargs)[1])
        if isinstance(outputs, Tensor) and verification.has_loss:
            outputs.backward()
            outputs = outputs.detach()
        return replace(verification, outputs=outputs)

    def _find_planned(self, purpose: str, args: tuple[object, ...], kwargs: dict[str, object]) -> CheckpointedModule:
        """Return the module whose plan covers a call, or raise an error if the call runs without a plan."""
        found = None if self._runs_plain() else self._find(args, kwargs, *read_arguments(args, kwargs))
        if found is None:
            raise ExecutionError(
                f"this call runs without a plan, so there is nothing to {purpose}: call train() and enable gradients;"
                ' on_mismatch="error" says what differs from the plan'
            )
        return found

    def _compare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Verification:
        held = {**dict(self.named_parameters()), **self.held_tensors()}
        names = {id(tensor): name for name, tensor in held.items() if tensor.requires_grad}
        trained = {name: held[name] for name in names.values()}
        read = ReadNames(self.module, self.loss)
        comparison = Comparison(
            self,
            args,
            kwargs,
            trained,
            held=held.values(),
            generators=OutsideStates(self.module, self.loss, read).states,
        )

        def run(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            return self.run_planned(args, kwargs, read_arguments(args, kwargs)[1])

        return comparison.verify(self.run_plain, run)

    def _verify_first(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        verification = self._compare(args, kwargs)
        if not verification.is_trusted:
            raise ExecutionError(
                f"{verification.summary()}\nThis is an error of the planner, or of an operator that computes something"
                " else than in a plain step: train without a plan, and report it."
            )
        if not verification.is_equal:
            warnings.warn(verification.summary(), stacklevel=5)
        self._is_unverified = False

    def run_planned(self, args: tuple[object, ...], kwargs: dict[str, object], inputs: Sequence[Tensor]) -> object:
        """Run the forward of the plan for a call that it covers.

        Parameters
        ----------
        args, kwargs
            The arguments of the call.
        inputs : sequence of Tensor
            The distinct tensors in them.
        """
        raise NotImplementedError

    def held_tensors(self) -> dict[str, Tensor]:
        """Return tensors that the step reads and that are neither arguments nor registered, by name."""
        return {}

    def run_plain(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run the model and its loss without a plan."""
        outputs = self.module(*args, **kwargs)
        return outputs if self.loss is None else self.loss(outputs)

    def difference(self, call: CallKey, inputs: Sequence[Tensor]) -> str:
        """Return the first difference between a call, or the model now, and the plan; "" if there is none.

        Parameters
        ----------
        call : CallKey
        inputs : sequence of Tensor
            The distinct tensors of the call.
        """
        if found := call.difference(self.planned_call) or self.state_difference():
            return found
        return next((found for condition in self.conditions if (found := condition.difference(inputs))), "")

    def state_difference(self) -> str:
        """Return the first difference between the model now and when it was planned; "" if there is none."""
        return self.modes.difference()

    def __getattr__(self, name: str) -> Any:
        """Return a submodule, parameter or buffer of the original: `torch.func.functional_call` replaces them here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = vars(self).get(MODULES, {}).get("module")
            for held in (vars(inner)[kind] for kind in _REGISTERED) if inner is not None else ():
                if name in held:
                    return held[name]
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a tensor that replaces one of the original is set there."""
        inner = vars(self).get(MODULES, {}).get("module")
        if isinstance(value, Tensor) and inner is not None:
            for held in (vars(inner)[kind] for kind in (PARAMETERS, BUFFERS)):
                if name in held:
                    held[name] = value
                    return
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ExecutionError(
            "a planned module cannot be copied or pickled, because it holds the code of its plan. To copy it, copy the"
            ' original, which is in the attribute "module", and pass the copy and this plan to checkpointed(). To save'
            " it, save state_dict() and plan.save(PATH), and pass Plan.load(PATH) to checkpointed() again."
        )

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


_REGISTERED = (MODULES, PARAMETERS, BUFFERS)


class RunnerModule(CheckpointedModule):
    """A planned module whose steps are run by a `StepRunner`, which subclasses set.

    Attributes
    ----------
    runner : StepRunner
    """

    runner: StepRunner

    def run_planned(self, args: tuple[object, ...], kwargs: dict[str, object], inputs: Sequence[Tensor]) -> object:
        """Run the forward of the plan; see `CheckpointedModule`."""
        return self.runner.run(inputs)

    def held_tensors(self) -> dict[str, Tensor]:
        """Return tensors that the step reads and that are neither arguments nor registered, by name."""
        return self.runner.tensors()

    def state_difference(self) -> str:
        """Return the first difference between the model now and when it was planned; "" if there is none."""
        return super().state_difference() or self.runner.difference()


class OtherPlans:
    """Plans of one model and budget for calls that the first plan does not cover.

    Parameters
    ----------
    make : callable
        Takes args and kwargs of a call and returns a module with a plan for it.
    max_shapes : int
        Number of plans that are kept, the first plan included; the least recently used of the
        others is dropped first.

    Attributes
    ----------
    modules : list of CheckpointedModule
        One for each plan, the most recently used last.

    Raises
    ------
    InvalidOptionError
        If `max_shapes` is not a positive int.
    """

    def __init__(
        self,
        make: Callable[[Sequence[object], Mapping[str, object]], CheckpointedModule],
        *,
        max_shapes: int = MAX_SHAPES,
    ) -> None:
        if isinstance(max_shapes, bool) or not isinstance(max_shapes, int) or max_shapes < 1:
            raise InvalidOptionError(f"max_shapes must be an int >= 1, got {max_shapes!r}")
        self.modules: list[CheckpointedModule] = []
        self.max_shapes = max_shapes
        self._make = make

    def find(
        self, call: CallKey, inputs: Sequence[Tensor], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> CheckpointedModule:
        """Return the module that covers a call with these distinct tensors; if there is none, make one."""
        found = next((module for module in self.modules if not module.difference(call, inputs)), None)
        if found is None:
            found = self._make(args, kwargs)
        else:
            self.modules.remove(found)
        self.modules.append(found)
        del self.modules[: max(0, len(self.modules) + 1 - self.max_shapes)]
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
