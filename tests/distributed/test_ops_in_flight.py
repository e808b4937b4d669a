"""Every op of torch's database gives the same on parameters in flight as on plain ones."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import threading
import time
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import shardfuse
from shardfuse.comm.session import PeerError
from shardfuse.engine import gather as pending_params
from shardfuse.engine.gather import PendingParam
from shardfuse.grads.sharded import ConsumedGradGuard, ConsumedGradParam
from tests.support.in_flight import PLACEMENTS, InFlight

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.cpu_only("params are under way over sockets only"),
    pytest.mark.filterwarnings("ignore"),
]

Case = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any], bool]
"""Name, function, arguments, keyword arguments, and whether it writes its arguments."""

NUM_SHARES = 8
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided"} | {
    "new_empty",
    "new_empty_strided",
}


@cache
def databases() -> tuple[list[Any], list[Any]]:
    """Return torch's ops, and those over lists of tensors."""
    from torch.testing._internal import common_methods_invocations as db

    lists = [
        *db.foreach_unary_op_db,
        *db.foreach_binary_op_db,
        *db.foreach_pointwise_op_db,
        *db.foreach_reduce_op_db,
        *db.foreach_other_op_db,
    ]
    return [op for op in db.op_db if torch.float32 in op.dtypes], lists


def samples(op: Any, most: int) -> list[Any]:
    """Return the first and the last of an op's samples."""
    torch.manual_seed(0)
    found = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
    return found if len(found) <= most else [*found[: most - 1], found[-1]]


def cases_of(op: Any, most: int) -> Iterator[Case]:
    for number, sample in enumerate(samples(op, most)):
        name = f"{op.name} {op.variant_test_name} {number}"
        args = (sample.input, *sample.args)
        yield name, op.op, args, sample.kwargs, False
        for kind in ("method", "operator"):
            variant = getattr(op, f"{kind}_variant")
            if variant is not None:
                yield f"{name}, {kind}", variant, args, sample.kwargs, False
        for kind in ("inplace", "inplace_operator"):
            variant = getattr(op, f"{kind}_variant")
            if variant is not None:
                yield f"{name}, {kind}", variant, args, sample.kwargs, True


def cases_of_list(op: Any, most: int) -> Iterator[Case]:
    for number, sample in enumerate(samples(op, most)):
        args = (sample.input, *sample.args)
        kwargs = {key: value for key, value in sample.kwargs.items() if key != "zero_size"}
        for variant, writes in ((op.method_variant, False), (op.inplace_variant, True)):
            if variant is not None:
                name = f"{op.name} {number}{', inplace' if writes else ''}"
                yield name, variant, args, kwargs, writes


def is_replaced(value: Any) -> bool:
    """Return whether an argument can be a parameter of the optimizer."""
    return (
        type(value) is Tensor
        and value.dtype == torch.float32
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.is_conj() or value.is_neg())
    )


def flat_tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]


def call(case: Case, make: Callable[[list[Tensor]], list[Any]]) -> tuple[Any, list[Any]]:
    """Return what a case gives, or its error, and the parameters that it was called with."""
    _, function, args, kwargs, writes = case
    found = [leaf for leaf in tree_flatten((args, kwargs))[0] if is_replaced(leaf)]
    params = make([leaf.contiguous() for leaf in found])
    by_id = {id(leaf): param for leaf, param in zip(found, params, strict=True)}
    args, kwargs = tree_map(
        lambda leaf: by_id.get(id(leaf), leaf.clone() if isinstance(leaf, Tensor) else leaf),
        (args, kwargs),
    )
    torch.manual_seed(1)
    with torch.set_grad_enabled(not writes):
        try:
            return function(*args, **kwargs), params
        except Exception as error:
            return error, params


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Exception) or isinstance(other, Exception):
        return type(one) is type(other)
    ones, others = tree_flatten(one)[0], tree_flatten(other)[0]
    if len(ones) != len(others):
        return False
    for x, y in zip(ones, others, strict=True):
        if isinstance(x, Tensor) != isinstance(y, Tensor):
            return False
        if isinstance(x, Tensor):
            try:
                torch.testing.assert_close(x.detach(), y.detach(), equal_nan=True)
            except AssertionError:
                return False
        elif isinstance(x, float | int | str | torch.dtype) and x != y and x == x:
            return False
    return True


def faults(cases: Iterable[Case]) -> tuple[list[str], int]:
    """Return what is wrong on parameters in flight, and how many (op, placement) there were."""
    wrong, num_cases = [], 0
    for case in cases:
        if not any(is_replaced(leaf) for leaf in tree_flatten(case[2:4])[0]):
            continue
        expected, plain = call(case, lambda values: [nn.Parameter(v.clone()) for v in values])
        for placement in PLACEMENTS:
            flights: list[InFlight] = []

            def fly(
                values: list[Tensor], flights: list[InFlight] = flights, where: str = placement
            ) -> list[Any]:
                flights.append(InFlight(values, where))
                assert flights[0].is_whole
                return flights[0].params

            found, params = call(case, fly)
            num_cases += 1
            if isinstance(found, RuntimeError) and "is not resizable" in str(found):
                # As of every parameter that lies in a flat buffer, in flight or not: addbmm_()
                # makes its output anew where that was broadcast.
                assert case[0].startswith("addbmm")
                flights[0].land()
                continue
            is_drawn = case[0].split(" ")[0] in UNINITIALIZED
            if not is_drawn and not same(found, expected):
                wrong.append(
                    f"{case[0]}, {placement}: {found!r:.300} in place of {expected!r:.300}"
                )
            flights[0].land()
            if not is_drawn and not same(params, plain):
                wrong.append(f"{case[0]}, {placement}: the arguments have other values then")
    return wrong, num_cases


@pytest.mark.parametrize("share", range(NUM_SHARES))
def test_every_op(share: int) -> None:
    """Out of place, in place, as methods and operators: 0 wrong, 0 stale, 0 errors of ours."""
    ops, _ = databases()
    wrong, num_cases = faults(c for op in ops[share::NUM_SHARES] for c in cases_of(op, 3))
    print(f"{num_cases} cases")
    assert not wrong, (len(wrong), wrong[:20])
    assert num_cases > 500


def test_every_op_over_lists() -> None:
    """torch._foreach_*, which optimizers and averages of parameters use."""
    _, lists = databases()
    wrong, num_cases = faults(c for op in lists for c in cases_of_list(op, 4))
    print(f"{num_cases} cases")
    assert not wrong, (len(wrong), wrong[:20])
    assert num_cases > 500


def opened(*values: Any) -> Tensor:
    """Add up what is in containers of any kind; torch asks the first tensor's class."""
    first = values[0]
    if has_torch_function((first,)):
        result: Tensor = handle_torch_function(opened, (first,), *values)
        return result
    return torch.stack([leaf.detach().double().sum() for leaf in leaves(values)]).sum()


def leaves(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a container; an iterator is used up."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in (*value, *value.values()):
            yield from leaves(item)
    elif isinstance(value, Output):
        yield from leaves([value.one, value.other])
    elif not isinstance(value, str):
        for item in value:
            yield from leaves(item)


Pair = namedtuple("Pair", ["one", "other"])


@dataclass
class Output:
    """As models return."""

    one: Any
    other: Any


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "plain": lambda one, other: other,
    "the same twice": lambda one, other: [one, one, other, other],
    "list": lambda one, other: [one, other],
    "tuple": lambda one, other: (one, other),
    "named tuple": Pair,
    "set": lambda one, other: {one, other},
    "deque": lambda one, other: deque([one, other]),
    "dict": lambda one, other: OrderedDict(a=one, b=other),
    "keys of a dict": lambda one, other: {one: other},
    "nested": lambda one, other: [({"a": [one]}, Pair(other, [other])), "text", ()],
    "generator": lambda one, other: (param for param in (one, other)),
    "iterator": lambda one, other: iter([one, other]),
    "keys": lambda one, other: {one: 1, other: 2}.keys(),
    "dataclass": Output,
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("is_first_plain", [False, True])
def test_containers(name: str, placement: str, is_first_plain: bool) -> None:
    """Wherever a function's arguments are, all have arrived; iterators are not used up before."""
    values = [torch.randn(5, 7), torch.randn(30), torch.randn(3, 3)]
    expected = opened(values[0], CONTAINERS[name](values[1], values[2]))
    flight = InFlight(values, placement)
    first, *others = flight.params
    assert flight.is_whole
    if is_first_plain:  # it may have been read before
        first.sum()
    assert torch.equal(opened(first, CONTAINERS[name](*others)), expected)
    flight.land()


READS: dict[str, Callable[[nn.Parameter, nn.Parameter], Any]] = {
    "linear": lambda w, b: nn.functional.linear(torch.ones(2, 30), w, b[:20]),
    "addmv": lambda w, b: torch.addmv(torch.ones(20), w, b),
    "merge of LoRA": lambda w, b: torch.no_grad()(w.data.addmm_)(b[:20, None], b[None]),
    "cat": lambda w, b: torch.cat([w, b[None]]),
    "foreach": lambda w, b: torch._foreach_mul([w, b], 2.0),
    "foreach in place": lambda w, b: torch.no_grad()(torch._foreach_mul_)([w, b], 2.0) and [w, b],
    "in place": lambda w, b: torch.no_grad()(w.add_)(b),
    "item assignment": lambda w, b: torch.no_grad()(w.__setitem__)(0, b) or w,
    "copy_": lambda w, b: torch.zeros(20, 30).copy_(b) + torch.zeros(20, 30).copy_(w),
    "out=": lambda w, b: torch.no_grad()(torch.mul)(w, b, out=torch.zeros(20, 30)),
    "deepcopy": lambda w, b: copy.deepcopy([w, b]),
    "copy": lambda w, b: [copy.copy(w), copy.copy(b)],
    "pickle": lambda w, b: pickle.loads(pickle.dumps((w, b))),
    "type(p)(data)": lambda w, b: type(w)(w.data) + type(b)(torch.ones(30)),
    "grad of both": lambda w, b: torch.autograd.grad((w * b).sum(), [w, b]),
    "einsum": lambda w, b: torch.einsum("ij,j->i", w, b),
    "vmap": lambda w, b: torch.vmap(lambda row: row.sum())(w),
    "vmap of two": lambda w, b: torch.vmap(torch.dot, in_dims=(0, None))(w, b),
    "vmap of the last dimension": lambda w, b: torch.vmap(torch.sum, in_dims=-1)(w),
    "numpy": lambda w, b: torch.from_numpy(w.detach().numpy().copy()),
    "array protocol": lambda w, b: torch.tensor(w.detach().__array__()),
    "__dlpack__": lambda w, b: torch.utils.dlpack.from_dlpack(w.detach().__dlpack__()).clone(),
    "from_dlpack": lambda w, b: torch.from_dlpack(w.detach()).clone(),
    "to_dlpack": lambda w, b: torch.from_dlpack(torch.utils.dlpack.to_dlpack(w)).clone(),
    "untyped_storage": lambda w, b: torch.tensor(w.untyped_storage().tolist()),
    "typed storage": lambda w, b: torch.tensor(w.storage().tolist()),
    "set_": lambda w, b: torch.empty(0).set_(w.detach()).clone(),
    "torch.ops": lambda w, b: torch.ops.aten.mul.Tensor(w, b),
    "torch.ops packet": lambda w, b: torch.ops.aten.mul(w, b),
    "swap_tensors": lambda w, b: swapped(w),
    "is_set_to": lambda w, b: float(w.is_set_to(b)),
    "trace": lambda w, b: traced(w),
    "TorchScript function": lambda w, b: torch.jit.script(scripted)(w, b),
    "torch.func.grad": lambda w, b: torch.func.grad(lambda x: x.square().sum())(w),
    "torch.func.grad of two": lambda w, b: torch.func.grad(total, argnums=(0, 1))(w, b),
    "torch.func.grad of a dict": lambda w, b: torch.func.grad(of_dict)({"w": w, "b": b}),
    "torch.func.vjp": lambda w, b: torch.func.vjp(torch.mul, w, b)[1](torch.ones(20, 30)),
    "torch.func.jvp": lambda w, b: torch.func.jvp(torch.exp, (w,), (torch.ones(20, 30),)),
    "torch.func.jacrev": lambda w, b: torch.func.jacrev(torch.exp)(b),
    "torch.func.jacfwd": lambda w, b: torch.func.jacfwd(torch.exp)(b),
    "torch.func.hessian": lambda w, b: torch.func.hessian(lambda x: x.pow(3).sum())(b),
    "torch.func.linearize": lambda w, b: torch.func.linearize(torch.exp, b)[1](torch.ones(30)),
    "what a function under vmap reads": lambda w, b: torch.vmap(lambda x: x * b)(torch.ones(2, 30)),
    "under a mode of dispatch": lambda w, b: under_dispatch(w, b),
    "under a mode of functions": lambda w, b: under_functions(w, b),
    "on another default device": lambda w, b: under_device(w, b),
    "inference": lambda w, b: torch.inference_mode()(torch.mul)(w, b),
}


def scripted(one: Tensor, other: Tensor) -> Tensor:
    return one * other


def total(w: Tensor, b: Tensor) -> Tensor:
    return (w * b).sum()


def of_dict(params: dict[str, Tensor]) -> Tensor:
    return total(**params)


def traced(weight: nn.Parameter) -> Any:
    module = nn.Linear(30, 20, bias=False)
    module.weight = weight
    trace = torch.jit.trace(module, torch.ones(1, 30))
    return trace(torch.ones(1, 30)), str(trace.graph).count("aten::")


def swapped(param: nn.Parameter) -> Tensor:
    other = nn.Parameter(torch.zeros_like(param))
    torch.utils.swap_tensors(param, other)
    return other + param


class Dispatched(TorchDispatchMode):
    """Notes what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Notes which functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def under_dispatch(w: nn.Parameter, b: nn.Parameter) -> Tensor:
    with Dispatched() as mode:
        result = torch.mul(w, b)
    assert mode.names == ["aten.mul.Tensor"]
    return result


def under_functions(w: nn.Parameter, b: nn.Parameter) -> Tensor:
    with Called() as mode:
        result = torch.mul(w, b)
    assert mode.names == ["mul"]
    return result


def under_device(w: nn.Parameter, b: nn.Parameter) -> Tensor:
    with torch.device("meta"):
        return torch.mul(w, b)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", READS)
def test_readers(name: str, placement: str) -> None:
    """What reads two parameters gives what it gives for plain ones, and the same afterwards."""
    values = [torch.randn(20, 30), torch.randn(30)]
    plain = [nn.Parameter(value.clone()) for value in values]
    expected = READS[name](*plain)  # type: ignore[call-arg]
    flight = InFlight(values, placement)
    assert flight.is_whole
    found = READS[name](*flight.params)  # type: ignore[call-arg]
    assert same(found, expected), (found, expected)
    assert not any(type(leaf) is PendingParam for leaf in flat_tensors(found))
    flight.land()
    assert same(flight.params, plain)


to_dlpack = torch.utils.dlpack.to_dlpack  # before any step: torch's own function

UNSEEN: dict[str, Callable[[nn.Parameter], Any]] = {
    "`to_dlpack` under a name": lambda w: torch.from_dlpack(to_dlpack(w)).clone(),
    "extension's kernel": lambda w: vars(torch._C)["_to_dlpack"](w),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_seen_is_listed(name: str) -> None:
    """Torch offers no hook for these: the page names them. One that is seen leaves the page."""
    page = Path(shardfuse.__file__).parent / "optim" / "errors.md"
    assert name in page.read_text()
    flight = InFlight([torch.ones(4, 4)])
    UNSEEN[name](flight.params[0])
    assert type(flight.params[0]) is PendingParam
    flight.land()


def test_torch_is_as_before_afterwards() -> None:
    """What is replaced while something is in flight is torch's own again."""
    before = torch.utils.dlpack.to_dlpack
    flight = InFlight([torch.ones(4, 4)])
    assert torch.utils.dlpack.to_dlpack is not before
    flight.land()
    assert torch.utils.dlpack.to_dlpack is before is torch.to_dlpack


def lose(flight: InFlight) -> None:
    """Have the buckets of ``flight`` never arrive."""

    def fail(self: Any) -> None:
        time.sleep(0.05)
        raise PeerError("rank 1 has ended.")

    for handle in flight._sync._in_flight.values():
        handle.wait = functools.partial(fail, handle)  # type: ignore[method-assign]


def test_an_error_is_told_to_every_thread_and_to_children() -> None:
    """What never arrives is an error in each thread that reads it, and in a forked child."""
    flight = InFlight([torch.ones(4, 4), torch.ones(3)])
    lose(flight)
    told: list[str] = []

    def read(param: Tensor) -> None:
        try:
            param.sum()
        except PeerError as error:
            told.append(str(error))

    threads = [threading.Thread(target=read, args=(flight.params[i % 2],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 6
    assert all("rank 1 has ended." in text for text in told)


def test_a_fork_while_something_is_lost() -> None:
    """os.fork() swallows no error: the child is told, and waits for nobody."""
    flight = InFlight([torch.ones(4, 4)])
    lose(flight)
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            flight.params[0].sum()
            os.write(sender, b"no error")
        except PeerError as error:
            os.write(sender, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert "rank 1 has ended." in os.read(receiver, 1000).decode()
    with pytest.raises(PeerError, match="rank 1 has ended"):
        flight.params[0].sum()
    assert pending_params.LOCK.acquire(blocking=False)
    pending_params.LOCK.release()


def test_a_forward_after_sent_gradients_waits_for_no_other_optimizer() -> None:
    """A param whose gradient was sent (stage 2) is no tensor of unknown origin."""
    flight = InFlight([torch.ones(4, 4)])  # first: its hook sees the param before it is restored
    module, guard = nn.Linear(2, 2), ConsumedGradGuard()
    module(torch.ones(1, 2)).sum().backward()
    guard.consume(module.weight, "weight")
    assert type(module.weight) is ConsumedGradParam
    module(torch.ones(1, 2))
    assert type(module.weight) is nn.Parameter
    assert flight.is_whole
    flight.land()
