"""What is expected of torch's private names for values: tensors, operators, modules, nested values, autograd."""

from __future__ import annotations

import ctypes
import functools
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from scheduler.pytorch.torch_private import autograd, guards, modules, operators, pytree, tensor_words, tensors
from tests.pytorch.torch_private.expectations import VALUES, Expectations, public_names

EXPECTED = Expectations()
NAMES = public_names(VALUES)
aten = torch.ops.aten


def test_there_is_an_expectation_of_every_name() -> None:
    assert sorted(EXPECTED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_torch_does_what_is_expected_of(name: str) -> None:
    EXPECTED[name]()


@EXPECTED.of("pytree.tree_flatten", "pytree.tree_unflatten", "pytree.tree_leaves", "pytree.tree_structure")
def values_are_flattened_and_built_again() -> None:
    value = {"a": [1, None], "b": (2, {"c": torch.ones(1)})}
    leaves, spec = pytree.tree_flatten(value)
    assert leaves[:3] == [1, None, 2]
    assert leaves[3] is value["b"][1]["c"]
    assert pytree.tree_unflatten(leaves, spec) == value
    assert pytree.tree_leaves(value)[:3] == leaves[:3]
    assert pytree.tree_structure(value) == spec
    assert pytree.tree_structure([1]) != pytree.tree_structure((1,))


@EXPECTED.of("pytree.TreeSpec")
def structures_are_compared() -> None:
    spec = pytree.tree_structure({"a": [1, 2]})
    assert isinstance(spec, pytree.TreeSpec)
    assert (spec.num_leaves, spec) == (2, pytree.tree_structure({"a": [3, 4]}))


@EXPECTED.of("pytree.tree_flatten_with_path", "pytree.keystr", "pytree.SequenceKey", "pytree.MappingKey")
def leaves_are_named() -> None:
    found, _ = pytree.tree_flatten_with_path({"a": [1, 2]})
    assert [(pytree.keystr(path), leaf) for path, leaf in found] == [("['a'][0]", 1), ("['a'][1]", 2)]
    assert found[1][0] == (pytree.MappingKey("a"), pytree.SequenceKey(1))


@dataclass
class Pair:
    first: object
    second: object


@EXPECTED.of("pytree.register_pytree_node", "pytree.GetAttrKey", "pytree.KeyEntry")
def a_class_becomes_a_container() -> None:
    if pytree.tree_structure(Pair(1, 2)).num_leaves == 1:
        pytree.register_pytree_node(
            Pair,
            lambda pair: ([pair.first, pair.second], None),
            lambda parts, _: Pair(*parts),
            flatten_with_keys_fn=lambda pair: ([(pytree.GetAttrKey("first"), pair.first)], None),
        )
    assert pytree.tree_leaves([Pair(1, 2)]) == [1, 2]
    (((_, key), _),) = pytree.tree_flatten_with_path([Pair(1, 2)])[0]
    assert key == pytree.GetAttrKey("first")
    assert (pytree.keystr((key,)), key.name) == (".first", "first")


@EXPECTED.of("pytree.tree_map_only")
def leaves_of_one_type_are_replaced() -> None:
    assert pytree.tree_map_only(int, lambda number: number + 1, ([1, "a"], 2.0)) == ([2, "a"], 2.0)


@EXPECTED.of("autograd.is_transformed")
def transforms_are_noticed() -> None:
    seen = []

    def function(value: Tensor) -> Tensor:
        seen.append(autograd.is_transformed())
        return value * 2

    torch.vmap(function)(torch.ones(2))
    torch.func.grad(function)(torch.ones(()))
    with forward_ad.dual_level():
        function(torch.ones(1))
    function(torch.ones(1))
    assert seen == [True, True, True, False]


@EXPECTED.of("autograd.autograd_node_name", "autograd.is_graph_kept")
def a_backward_knows_its_node_and_whether_it_is_kept() -> None:
    x = torch.ones(1, requires_grad=True)
    product = x * 2
    seen = []
    product.register_hook(lambda _: seen.append((autograd.autograd_node_name(), autograd.is_graph_kept())))
    product.sum().backward(retain_graph=True)
    product.sum().backward()
    assert [kept for _, kept in seen] == [True, False]
    assert seen[0][0].startswith("Mul")
    assert autograd.autograd_node_name() == ""


class Adding(autograd.TorchDispatchMode):
    """What `added_in_place_bytes` says of each sum."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.add.Tensor:
            self.bytes.append(autograd.added_in_place_bytes(func, args))
        return func(*args, **(kwargs or {}))


@EXPECTED.of("autograd.added_in_place_bytes")
def a_sum_of_gradients_that_only_autograd_holds_is_known() -> None:
    x, held = torch.ones(8, requires_grad=True), []
    with Adding() as adding:
        y = x.exp()
        ((y * 2).sum() + (y * 3).sum()).backward()
        z = y.detach().requires_grad_()
        double = z * 2
        other = z.view_as(z)  # the later node is the first in the backward
        other.register_hook(held.append)
        (double.sum() + (other * 3).sum()).backward()
    # Of each step, the sum in the forward, and that of the gradients; one of the second step is held.
    assert adding.bytes == [0, 8 * 4, 0, 0]


@EXPECTED.of("autograd.when_backward_ends")
def a_function_can_be_called_at_the_end_of_a_backward() -> None:
    x = torch.ones(1, requires_grad=True)
    gradients: list[float] = []
    for _ in range(2):
        product = x * 2
        product.register_hook(lambda _: autograd.when_backward_ends(lambda: gradients.append(x.grad.item())))
        product.sum().backward()
    assert gradients == [2, 4]


@EXPECTED.of("autograd.determinism_check_of")
def an_error_of_a_recomputation_can_name_it() -> None:
    widths = iter([2, 3])
    check = autograd.determinism_check_of('a call of "layer"')
    function = functools.partial(checkpoint, use_reentrant=False, determinism_check=check)
    loss = function(lambda: torch.ones(next(widths), requires_grad=True).exp().sum())
    with pytest.raises(RuntimeError, match='a call of "layer"'):
        loss.backward()


@EXPECTED.of("autograd.stops_early")
def early_ends_can_be_switched_off() -> None:
    assert autograd.stops_early()
    with set_checkpoint_early_stop(False):
        assert not autograd.stops_early()


@EXPECTED.of("modules.is_compiled")
def compiled_modules_are_known() -> None:
    module = nn.Linear(1, 1)
    assert not modules.is_compiled(module)
    assert modules.is_compiled(torch.compile(module, backend="eager"))
    assert not modules.is_compiled(module)
    module.compile(backend="eager")
    assert modules.is_compiled(module)


@EXPECTED.of("autograd.below_autograd")
def kernels_run_without_autograd() -> None:
    x = torch.ones(1, requires_grad=True)
    with autograd.below_autograd():
        assert (x * 2).grad_fn is None
        assert torch.is_grad_enabled()
    assert (x * 2).grad_fn is not None


@EXPECTED.of("autograd.autocast_disabled")
def autocast_is_left_and_its_copies_are_kept() -> None:
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        first = (x @ weight).grad_fn
        with autograd.autocast_disabled():
            assert (x @ weight).dtype == torch.float32
        again = x @ weight
    assert again.dtype == torch.bfloat16
    assert first is not None
    assert first.next_functions[1] == again.grad_fn.next_functions[1]


class Seeing(autograd.TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@EXPECTED.of("autograd.TorchDispatchMode", "autograd.modes_disabled")
def a_mode_sees_the_operators_of_forward_and_backward_until_it_is_disabled() -> None:
    x = torch.ones(1, requires_grad=True)
    with Seeing() as mode:
        (x * 2).backward()
        with autograd.modes_disabled():
            x.detach().exp()
    assert mode.seen.count("aten::mul.Tensor") == 2
    assert "aten::exp" not in mode.seen


@EXPECTED.of("autograd.not_compiled")
def a_function_is_called_by_compiled_code_as_it_is() -> None:
    compiling = []

    @autograd.not_compiled
    def function(value: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return value + 1

    assert torch.compile(lambda x: function(x) * 2, backend="eager")(torch.ones(1)).item() == 4
    assert compiling == [False]


@EXPECTED.of("tensors.DataDependentOutputException")
def a_branch_on_a_fake_value_is_an_error_of_its_own() -> None:
    with FakeTensorMode(), pytest.raises(tensors.DataDependentOutputException):
        bool(torch.arange(2).sum() == 1)


@EXPECTED.of("tensors.DynamicOutputShapeException")
def a_shape_that_depends_on_a_fake_value_is_an_error_of_its_own() -> None:
    with FakeTensorMode(), pytest.raises(tensors.DynamicOutputShapeException):
        torch.arange(2).nonzero()


@EXPECTED.of("tensors.is_fake")
def fake_tensors_are_known() -> None:
    with FakeTensorMode():
        assert tensors.is_fake(torch.empty(1))
    assert not tensors.is_fake(torch.empty(1, device="meta"))


@EXPECTED.of("tensors.has_data")
def fake_tensors_and_those_on_device_meta_have_no_data() -> None:
    with FakeTensorMode():
        assert not tensors.has_data(torch.empty(1))
    assert not tensors.has_data(torch.empty(1, device="meta"))
    assert tensors.has_data(torch.empty(1))


@EXPECTED.of("tensors.FakeTensor")
def a_fake_tensor_knows_the_mode_that_created_it() -> None:
    with tensors.FakeTensorMode() as mode:
        fake = torch.empty(2)
    assert isinstance(fake, tensors.FakeTensor)
    assert fake.fake_mode is mode


@EXPECTED.of("tensors.FakeTensorMode", "tensors.fake_mode_of", "tensors.fake_on_device")
def fake_tensors_replace_those_on_device_meta() -> None:
    mode = tensors.FakeTensorMode()
    weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    fakes = [tensors.fake_on_device(value, mode, "cpu") for value in (weight, weight.detach()[1])]
    assert [(tensors.fake_mode_of(fake), fake.device.type, type(fake)) for fake in fakes][1][:2] == (mode, "cpu")
    assert (isinstance(fakes[0], nn.Parameter), fakes[0].requires_grad, fakes[1].requires_grad) == (True, True, False)
    assert (fakes[1].shape, fakes[1].storage_offset()) == ((3,), 3)
    assert len({tensors.storage_id(value.untyped_storage()) for value in (weight, *fakes)}) == 1
    assert tensors.fake_mode_of(weight) is None


@EXPECTED.of("tensors.storage_id")
def views_have_the_storage_of_their_base_and_copies_another() -> None:
    def identity(value: Tensor) -> int:
        return tensors.storage_id(value.untyped_storage())

    x = torch.ones(4)
    assert identity(x) == identity(x[1:]) == identity(x.detach())
    assert identity(x) != identity(x.clone())
    with FakeTensorMode():
        y = torch.ones(4)
        assert identity(y) == identity(y[1:]) != identity(y.clone())


@EXPECTED.of("tensors.alias_of")
def an_alias_below_autograd_has_the_version_of_the_tensor() -> None:
    aliases: list[Tensor] = []

    class Keeping(autograd.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp.default:
                aliases.append(tensors.alias_of(result))
            return result

    with Keeping():
        value = torch.ones(1, requires_grad=True).exp()
        before = tensors.version_of(aliases[0])
        value.relu_()
    (alias,) = aliases
    assert alias.grad_fn is None
    assert alias.data_ptr() == value.data_ptr()
    assert tensors.version_of(alias) > before


@EXPECTED.of("tensors.version_of")
def versions_grow_with_changes_in_place() -> None:
    x = torch.ones(4)
    before = tensors.version_of(x)
    x[1:].add_(1)
    assert tensors.version_of(x) == before + 1
    x.detach().add_(1)
    assert tensors.version_of(x) == before + 2
    torch.add(x, 1)
    assert tensors.version_of(x) == before + 2


@EXPECTED.of("tensors.is_view")
def autograd_knows_views() -> None:
    x = torch.ones(4)
    assert (tensors.is_view(x[1:]), tensors.is_view(x), tensors.is_view(x.clone())) == (True, False, False)


@EXPECTED.of("tensors.is_traceable_wrapper_subclass")
def wrappers_are_known() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert tensors.is_traceable_wrapper_subclass(jagged)
    assert not tensors.is_traceable_wrapper_subclass(nn.Parameter(torch.ones(1)))


@EXPECTED.of("operators.OpOverload")
def operators_are_known() -> None:
    assert isinstance(aten.add.Tensor, operators.OpOverload)
    assert not isinstance(aten.add, operators.OpOverload)
    assert aten.add.Tensor.namespace == "aten"
    assert (aten.view.default.is_view, aten.add.Tensor.is_view) == (True, False)


@EXPECTED.of("operators.schema_of")
def schemas_say_what_an_operator_changes() -> None:
    schema = operators.schema_of(aten.add.out)
    assert (schema.name, schema.is_mutable) == ("aten::add", True)
    assert [argument.name for argument in schema.arguments if argument.is_out] == ["out"]
    (changed,) = (a.name for a in operators.schema_of(aten.mul_.Tensor).arguments if a.alias_info is not None)
    assert changed == "self"
    assert not operators.schema_of(aten.add.Tensor).is_mutable


@EXPECTED.of("operators.call_of")
def the_call_in_cpp_returns_the_same() -> None:
    x = torch.arange(3.0, requires_grad=True)
    result = operators.call_of(aten.add.Tensor)(x, x, alpha=2)
    assert torch.equal(result, x * 3)
    assert result.grad_fn is not None


@EXPECTED.of(
    "operators.DispatchKey", "operators.Kernels", "operators.replaced_kernels", "operators.forget_fake_results"
)
def a_kernel_in_python_is_used_and_taken_back() -> None:
    calls = []

    def counted(value: Tensor, dim: int) -> Tensor:
        calls.append(tensors.is_fake(value))
        return value.new_empty(7)

    kernels: dict[operators.OpOverload, operators.Kernels] = {
        aten.cumsum.default: {
            operators.DispatchKey.Meta: counted,
            operators.DispatchKey.CompositeImplicitAutograd: None,
        }
    }
    operators.forget_fake_results()
    before = dict(aten.cumsum.default.py_kernels)
    with operators.replaced_kernels(kernels), FakeTensorMode(), enable_python_dispatcher():
        assert torch.empty(2, 3).cumsum(0).shape == (7,)
    assert len(calls) == 1
    assert aten.cumsum.default.py_kernels == before
    operators.forget_fake_results()
    assert FakeTensorMode.cache_info().size == 0
    with FakeTensorMode(), enable_python_dispatcher():
        assert torch.empty(2, 3).cumsum(0).shape == (2, 3)


@EXPECTED.of("operators.without_effect_tokens")
def a_check_is_traced_as_a_plain_call() -> None:
    def checked(x: Tensor) -> tuple[Tensor]:
        aten._linalg_check_errors(x.to(torch.int32), "name", is_matrix=True)
        return (x * 2,)

    with operators.without_effect_tokens([aten._linalg_check_errors.default]):
        graph = make_fx(functionalize(checked), tracing_mode="fake")(torch.zeros(())).graph
        graph.eliminate_dead_code()
    (check,) = graph.find_nodes(op="call_function", target=aten._linalg_check_errors.default)
    assert check.is_impure()


@EXPECTED.of("operators.run_composite")
def a_composite_operator_calls_its_parts() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with Seeing() as mode:
        result = operators.run_composite(aten.linear.default, x, torch.ones(4, 3))
    assert torch.equal(result, x @ torch.ones(3, 4))
    assert "aten::mm" in mode.seen


@EXPECTED.of("operators.has_bfloat16_kernels")
def the_processor_is_asked() -> None:
    assert operators.has_bfloat16_kernels() in (True, False)


@EXPECTED.of("modules.PARAMETERS", "modules.BUFFERS", "modules.MODULES", "modules.parameters_of", "modules.buffers_of")
def a_module_reads_its_tensors_from_these_dicts() -> None:
    module = nn.BatchNorm1d(2)
    held = (modules.parameters_of(module), modules.buffers_of(module), modules.submodules_of(module))
    assert all(vars(module)[name] is kept for name, kept in zip(
        (modules.PARAMETERS, modules.BUFFERS, modules.MODULES), held, strict=True
    ))  # fmt: skip
    new = torch.full((2,), 3.0)
    modules.buffers_of(module)["running_mean"] = new
    assert module.running_mean is new
    assert dict(module.named_buffers(recurse=False)).keys() == modules.buffers_of(module).keys()
    assert modules.parameters_of(nn.Linear(1, 1, bias=False))["bias"] is None


@EXPECTED.of("modules.submodules_of")
def a_module_reads_its_parts_from_this_dict() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    assert modules.submodules_of(module) == {"0": module[0]}


@EXPECTED.of("modules.COMPILED_CALL")
def a_compiled_module_keeps_its_compiled_call() -> None:
    module = nn.Linear(1, 1)
    assert getattr(module, modules.COMPILED_CALL) is None
    module.compile(backend="eager")
    assert vars(module)[modules.COMPILED_CALL] is not None


@EXPECTED.of("modules.HOOKS", "modules.has_hooks", "modules.global_hooks")
def hooks_are_found_where_calls_read_them() -> None:
    module = nn.Linear(1, 1)
    registrations = (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
    )
    for register in registrations:
        assert not modules.has_hooks(module)
        handle = register(lambda *_: None)
        assert modules.has_hooks(module)
        assert [len(vars(module)[name]) for name in modules.HOOKS].count(1) == 1
        handle.remove()
    everywhere = (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    )
    for register in everywhere:
        handle = register(lambda *_: None)
        try:
            assert sum(map(len, modules.global_hooks().values())) == 1
        finally:
            handle.remove()


@EXPECTED.of("modules.accumulation_hooks_of", "modules.backward_hooks_of")
def hooks_of_a_tensor_are_called_from_these_dicts() -> None:
    for hooks_of, register in (
        (modules.accumulation_hooks_of, Tensor.register_post_accumulate_grad_hook),
        (modules.backward_hooks_of, Tensor.register_hook),
    ):
        x, seen = torch.ones(1, requires_grad=True), []
        assert hooks_of(x) == {}
        register(x, seen.append)
        held = hooks_of(x)
        kept = dict(held)
        held.clear()
        (x * 2).backward()
        held.update(kept)
        assert seen == []
        (x * 2).backward()
        assert len(seen) == 1


@EXPECTED.of("autograd.next_node_number", "autograd.node_number")
def autograd_nodes_are_numbered_in_the_order_of_the_forward() -> None:
    x = torch.ones(1, requires_grad=True)
    before = autograd.next_node_number()
    y = x * 2
    between = autograd.next_node_number()
    z = y * 2
    assert before <= autograd.node_number(y.grad_fn) < between <= autograd.node_number(z.grad_fn)


@EXPECTED.of("autograd.saving_hook")
def the_innermost_hook_for_saved_tensors_is_known() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    assert autograd.saving_hook() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert autograd.saving_hook() is pack
    assert autograd.saving_hook() is None


@EXPECTED.of("tensors.parts_of", "tensors.storage_of")
def a_tensor_has_a_storage_or_consists_of_tensors_that_have_one() -> None:
    dense = torch.eye(3)
    assert tensors.storage_id(tensors.storage_of(dense)) == tensors.storage_id(dense.untyped_storage())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some layouts are experimental
        others = [dense.to_sparse(layout=layout) for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)]
        others.append(torch.nested.nested_tensor([dense, dense], layout=torch.jagged))
    for tensor in others:
        assert tensors.storage_of(tensor) is None
        assert all(tensors.storage_of(part) is not None for part in tensors.parts_of(tensor))
        assert any(part.dtype == dense.dtype for part in tensors.parts_of(tensor))


@EXPECTED.of("modules.is_batch_norm")
def normalizations_with_statistics_are_known() -> None:
    assert all(map(modules.is_batch_norm, (nn.BatchNorm2d(1), nn.SyncBatchNorm(1), nn.InstanceNorm1d(1))))
    assert not modules.is_batch_norm(nn.LayerNorm(1))


@EXPECTED.of("modules.with_tensors")
def a_module_has_other_tensors_for_a_while() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    before, weight = module[0].weight, torch.full((1, 1), 5.0)
    with modules.with_tensors(module, {"0.weight": weight}):
        assert module[0].weight is weight
    assert module[0].weight is before


@EXPECTED.of("modules.remove_step_hooks")
def a_step_runs_without_hooks() -> None:
    optimizer, seen = torch.optim.SGD([torch.ones(1, requires_grad=True)]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    modules.remove_step_hooks(optimizer)
    optimizer.step()
    assert seen == ["before", "after"]


@EXPECTED.of("guards.Check", "guards.tensors_check", "guards.tensors_check_one_by_one")
def changes_of_the_properties_of_tensors_are_noticed() -> None:
    for make in (guards.tensors_check, guards.tensors_check_one_by_one):
        held = [torch.ones(2, 3), nn.Parameter(torch.ones(4))]
        check = make(held)
        held[0].add_(1)
        assert check()
        held[1].requires_grad_(False)
        assert not check()


@EXPECTED.of("tensor_words.TensorWords", "tensor_words.tensor_words")
def the_words_of_a_tensor_hold_its_sizes() -> None:
    words = tensor_words.tensor_words(torch.ones(2, 3))
    assert words is not None
    held = [ctypes.c_uint64.from_address(address).value for address in words.of_implementation]
    assert held[1:4] == [2, 2, 3]
    assert tensor_words.tensor_words(torch.ones(2, 3).to_sparse()) is None
