"""Bytes that each rank holds and sends, from the same layout that the optimizers use.

Nothing is measured, and no model is allocated: a layout consists of integers. The states, masters
and small all-reduces of an update rule are read off a step of a tiny optimizer (probe_optimizer()),
so a new rule is planned without a second description of it. Activations, the framework's own memory
and temporaries of autograd are not counted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import nn

from shardfuse.codecs import CHECK_NBYTES, BlockQuantizer
from shardfuse.comm.native import traits_of
from shardfuse.comm.transport import (
    AsyncModel,
    Completion,
    Label,
    PartialSums,
    ReduceOp,
    SingleRank,
    bucket_nbytes,
    completed,
    overlapped,
)
from shardfuse.config import ShardConfig
from shardfuse.grads.full import IN_FLIGHT
from shardfuse.grads.sharded import NUM_COUNTS, num_in_flight
from shardfuse.layout import Bucket, Flat, FlatLayout, ParamSpec, dense_stride, round_up
from shardfuse.plan.matrices import Axis, Collective, ExchangeCost, GroupedShapes
from shardfuse.plan.models import NamedShape, count_elements
from shardfuse.rules import MatrixRule

_NUMEL = 4096
_WORLD_SIZE = 2


class CountingCommunicator(SingleRank):
    """The first of ``world_size`` ranks, without peers: counts the traffic."""

    def __init__(self, world_size: int, async_model: AsyncModel) -> None:
        self.world_size, self.async_model = world_size, async_model
        self.all_reduces: list[int] = []
        """Elements of each all-reduce."""

    def reduce_scatter(
        self, input: torch.Tensor, into: torch.Tensor | None = None, **_: Any
    ) -> Completion[PartialSums]:
        part = input.chunk(self.world_size)[0]
        return completed((part if into is None else into.copy_(part),))

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: Label | None = None
    ) -> Completion[None]:
        return completed(None)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", *, label: Label | None = None
    ) -> Completion[None]:
        self.all_reduces.append(tensor.numel())
        return completed(None)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, *numels: Sequence[int]
    ) -> Completion[None]:
        return completed(None)


@dataclass(frozen=True)
class OptimizerTraits:
    """Memory and traffic per element of an optimizer class and its configuration."""

    granularity: str
    """Granularity of reductions, as in FlatLayout."""

    param_itemsize: float
    """Bytes per element on every rank: the parameter, and its copy in the dtype that is sent."""

    state_itemsize: float
    """Bytes per element of a rank's shard: moments, masters."""

    keeps_reduced: bool
    """Whether a step keeps the reduced gradients of a rank's shard, in fp32."""

    all_reduces: tuple[tuple[float, float], ...]
    """Small all-reduces of a step: (elements, elements per parameter) of each; see small_numels().

    Of a rule with sums over rows, the second is per row of all matrices.
    """

    takes_matrices: bool
    """Whether matrices have other states than these, and are exchanged; see plan/matrices.py."""

    def small_numels(self, shapes: Sequence[NamedShape]) -> list[float]:
        """Return the elements of each small all-reduce of a step."""
        count = len(shapes)
        if self.granularity == "row":
            count = sum(shape[0] for _, shape in shapes if len(shape) > 1)
        return [n for fixed, slope in self.all_reduces if (n := fixed + slope * count) > 0]


_VECTOR, MATRIX = (_NUMEL,), (64, _NUMEL // 64)


def probe_optimizer(
    build: Callable[..., Any],
    dtype: torch.dtype,
    config: ShardConfig,
    shape: tuple[int, ...] = _VECTOR,
) -> OptimizerTraits:
    """Return the traits of ``build(params, sharding=config)`` for parameters of ``dtype``.

    ``shape`` is that of the parameters, of 4096 elements.
    """
    optimizer = _build_counted(build, dtype, config, [shape] * 2)
    summary = optimizer.memory_summary()
    padded = sum(flat.numel for flat in optimizer.layout.flats)
    plain = replace(config, grad_sync_dtype=None, param_sync_dtype=None, grad_sync_bits=None)
    plain = replace(plain, param_sync_bits=None, stage=1)
    calls = []
    # A vector has no rows, so a rule with sums over rows makes a step of matrices.
    granularity = optimizer.layout.granularity
    stepped_shape, num_rows = (MATRIX, MATRIX[0]) if granularity == "row" else (shape, 1)
    for num_params in (2, 4):
        stepped = _build_counted(build, dtype, plain, [stepped_shape] * num_params)
        for _ in range(2):
            stepped.communicator.all_reduces.clear()
            params = [param for group in stepped.param_groups for param in group["params"]]
            for param in params:
                param.grad = torch.ones_like(param)
            stepped.step()
        calls.append(list(stepped.communicator.all_reduces))
    slopes = [(more - fewer) / 2 / num_rows for fewer, more in zip(*calls, strict=True)]
    return OptimizerTraits(
        granularity=granularity,
        param_itemsize=summary.param_nbytes / padded,
        state_itemsize=summary.state_nbytes * _WORLD_SIZE / padded,
        keeps_reduced=config.stage == 1 and _keeps_more_than_gradients(stepped, dtype),
        all_reduces=tuple(
            (fewer - 2 * num_rows * slope, slope)
            for fewer, slope in zip(calls[0], slopes, strict=True)
        ),
        takes_matrices=isinstance(optimizer._rule, MatrixRule),
    )


def group_shapes(
    build: Callable[..., Any],
    shapes: Sequence[NamedShape],
    dtype: torch.dtype,
    device: str,
    config: ShardConfig,
) -> GroupedShapes:
    """Return parameters in the groups that an optimizer with a MatrixRule makes of them."""
    own = _single_rank_config(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of names that the model itself does not need
        return GroupedShapes(lambda params: build(params, sharding=own), shapes, dtype, device)


def _single_rank_config(config: ShardConfig) -> ShardConfig:
    return replace(
        config,
        process_group="alone",
        mesh=None,
        kernel="eager",
        overlap_grad_sync=False,
        overlap_param_sync=False,
        consolidate_every=0,
    )


def _build_counted(
    build: Callable[..., Any],
    dtype: torch.dtype,
    config: ShardConfig,
    shapes: Sequence[tuple[int, ...]],
) -> Any:
    """Return an optimizer of parameters of these shapes, with a CountingCommunicator."""
    ones = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    params = [(f"p{i}", param) for i, param in enumerate(ones)]
    own = _single_rank_config(config)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # about names and shapes, which are made up here
        build(params, sharding=own)  # first, so that errors are those of a single rank
        return build(
            params,
            sharding=replace(
                own, process_group=CountingCommunicator(_WORLD_SIZE, AsyncModel.ORDERED)
            ),
        )


def _keeps_more_than_gradients(optimizer: Any, dtype: torch.dtype) -> bool:
    padded = sum(flat.numel for flat in optimizer.layout.flats)
    return bool(optimizer.memory_summary().grad_nbytes > padded * dtype.itemsize)


_MASTER_NBYTES = 4


@dataclass(frozen=True)
class BucketCost:
    """Cost of one bucket, in bytes; buckets are in the order of backward.

    Attributes:
        share: fraction of the model's elements.
        reduce: bytes that one rank sends for gradients, along both axes.
        gather: bytes that one rank sends for parameters.
        update: bytes that the update of this rank's shard reads and writes in memory.
        whole_update: the same for an update of the full bucket, as without sharding.
    """

    share: float
    reduce: float
    gather: float
    update: float
    whole_update: float


@dataclass(frozen=True)
class Budget:
    """Memory of one rank, and traffic of a step.

    Attributes:
        num_params, numel: tensors and elements of the model.
        num_shards, num_replicas: ranks along the shard axis and along the replicate axis.
        padded_numel: elements of the flat buffers.
        memory: bytes of one rank by part, longest-lived first.
        for_a_time: bytes of one rank that are held beside these during a part of a step, by kind.
        building_nbytes: most bytes of one rank while the optimizer is built, the model included.
        published: bytes of one rank by the formulas of the ZeRO paper (arXiv 1910.02054, section
            3), with this optimizer's bytes per element in place of its K.
        overlaps: whether gradients are reduced during backward, and parameters gathered during the
            next forward.
        needs_all: whether all gradients must be reduced before any parameter is updated.
        exchange: of matrices between ranks, under a rule that has one.
    """

    num_params: int
    numel: int
    num_shards: int
    num_replicas: int
    padded_numel: int
    num_buckets: int
    bucket_nbytes: int
    memory: dict[str, int]
    for_a_time: dict[str, int]
    building_nbytes: int
    published: dict[str, int]
    collectives: tuple[Collective, ...]
    buckets: tuple[BucketCost, ...]
    overlaps: tuple[bool, bool]
    needs_all: bool
    exchange: ExchangeCost | None

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.num_shards * self.num_replicas

    @property
    def total_nbytes(self) -> int:
        """Bytes that one rank holds between steps."""
        return sum(self.memory.values())

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that one rank holds: in backward, in step(), or while it builds.

        It is of a loop that calls clip_grad_norm(), which keeps reduced gradients in fp32.
        """
        return max(self.total_nbytes + max(self.for_a_time.values()), self.building_nbytes)


def plan(
    shapes: Sequence[NamedShape],
    build: Callable[..., Any],
    *,
    world_size: int,
    num_replicas: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "npu",
    sharding: ShardConfig | None = None,
    progress: AsyncModel | str | None = None,
) -> Budget:
    """Return the budget of training parameters of ``shapes`` on so many ranks.

    Args:
        shapes: (name, shape) of each parameter, in the order of registration.
        build: returns the optimizer for (params, sharding=...), such as ``ShardedLamb``.
        world_size: number of all ranks.
        num_replicas: rows of a mesh; 1: all ranks shard.
        dtype: dtype of the parameters.
        device: "npu", "cuda" or "cpu", which decides how slots are aligned.
        sharding: as for the optimizer; its process group and mesh are ignored.
        progress: how asynchronous collectives progress there; None: "in order" on accelerators, and
            as gloo's sockets on the CPU. HCCL's zero-copy counts if TORCH_HCCL_ZERO_COPY is set.

    Raises:
        ValueError: ``world_size`` is no multiple of ``num_replicas``, or less than 1; or gradients
            are reduced elsewhere.
    """
    check_world(world_size, num_replicas)
    config = _effective_config(sharding or ShardConfig(), world_size, num_replicas)
    if progress is None:
        progress = AsyncModel.UNORDERED if device == "cpu" else AsyncModel.ORDERED
    how = AsyncModel(progress)
    costs = _Costs(shapes, build, world_size // num_replicas, num_replicas, dtype, config, how)
    return costs.budget(device)


def check_world(world_size: int, num_replicas: int) -> None:
    """Raise ValueError if ranks do not form rows of equal length."""
    if world_size < 1 or num_replicas < 1 or world_size % num_replicas:
        raise ValueError(
            f"Invalid world_size: {world_size} ranks in {num_replicas} rows. Give a multiple."
        )


def formulas(numel: int, num_ranks: int, item: int, k: float) -> dict[str, int]:
    """Return the ZeRO paper's bytes: parameters, gradients, and K for states and masters.

    ``item`` and ``k`` are bytes per element.
    """
    return {
        "replicated (DDP)": round(numel * (2 * item + k)),
        "ZeRO-1": round(numel * (2 * item + k / num_ranks)),
        "ZeRO-2": round(numel * (item + (item + k) / num_ranks)),
        "ZeRO-3": round(numel * (2 * item + k) / num_ranks),
    }


def _effective_config(config: ShardConfig, world_size: int, num_replicas: int) -> ShardConfig:
    """Return the options that have an effect on so many ranks.

    Raises:
        ValueError: an optimizer would refuse them, or their traffic is not known here.
    """
    if config.grads_are_reduced is True:
        raise ValueError(
            "Invalid grads_are_reduced: True. A plan counts what shardfuse sends, and not what "
            "another wrapper does. Leave it out."
        )
    if num_replicas > 1 and num_replicas == world_size:
        raise ValueError(
            f"Invalid world_size: {world_size} ranks in {num_replicas} rows of one rank, so "
            "nothing is sharded. Give fewer replicas."
        )
    if num_replicas > 1:
        replace(config, mesh=True)  # raises for options that a mesh does not support
    if world_size > 1:
        return config
    return replace(config, param_sync_dtype=None, param_sync_bits=None, grad_sync_bits=None)


class _Costs:
    """Everything that follows from shapes and configuration."""

    def __init__(
        self,
        shapes: Sequence[NamedShape],
        build: Callable[..., Any],
        num_shards: int,
        num_replicas: int,
        dtype: torch.dtype,
        config: ShardConfig,
        progress: AsyncModel,
    ) -> None:
        self.shapes, self.dtype, self.config, self.progress = shapes, dtype, config, progress
        self.shards, self.replicas = num_shards, num_replicas
        self.traits: OptimizerTraits = probe_optimizer(build, dtype, config)
        self._state_itemsizes: dict[str, float] = {}  # by storage, where matrices have their own
        self._build, self._exchange = build, cast(ExchangeCost | None, None)
        # Over two axes a second reduction follows, so buckets complete in order.
        self.moves = AsyncModel.ORDERED if num_replicas > 1 else progress
        is_sent = num_shards > 1
        self.overlaps_grads = is_sent and (
            config.stage == 2 or self.moves in self._overlapped(config.overlap_grad_sync)
        )
        self.overlaps_params = is_sent and self.moves in self._overlapped(config.overlap_param_sync)

    def _overlapped(self, choice: bool | Literal["auto"]) -> list[AsyncModel]:
        """Return the models under which an optimizer overlaps."""
        return overlapped(choice, in_order=self.replicas == 1)

    def budget(self, device: str) -> Budget:
        layout = self.layout = self._layout(device)
        is_hccl = device == "npu" and self.progress is AsyncModel.ORDERED
        self._copies_gathered = is_hccl and not traits_of("hccl").in_place_all_gather
        numel, padded = count_elements(self.shapes), sum(flat.numel for flat in layout.flats)
        return Budget(
            num_params=len(self.shapes),
            numel=numel,
            num_shards=self.shards,
            num_replicas=self.replicas,
            padded_numel=padded,
            num_buckets=len(layout.buckets),
            bucket_nbytes=max(b.numel for b in layout.buckets) * self.dtype.itemsize,
            memory=self._memory(padded),
            for_a_time=self._temporary_nbytes(padded),
            building_nbytes=self._building(padded, device),
            published=formulas(
                numel,
                self.shards * self.replicas,
                self.dtype.itemsize,
                self._state_nbytes / padded,
            ),
            collectives=tuple(self._collectives()),
            buckets=tuple(self._bucket(bucket, padded) for bucket in layout.buckets),
            overlaps=(self.overlaps_grads, self.overlaps_params),
            needs_all=len(self.traits.small_numels(self.shapes)) > 0 or self._exchange is not None,
            exchange=self._exchange,
        )

    def _layout(self, device: str) -> FlatLayout:
        grouped = self._grouped(device)
        if grouped is None:
            return self._lay_out(self._plain_specs(device), device)
        layout = self._lay_out(grouped.specs, device)
        of_matrices = probe_optimizer(self._build, self.dtype, self.config, MATRIX)
        self._state_itemsizes = dict.fromkeys(grouped.storages, of_matrices.state_itemsize)
        numel = sum(f.numel for f in layout.flats if self._storage(layout, f) in grouped.storages)
        if self.shards > 1:
            self._exchange = grouped.cost(self.shards, numel // self.shards)
        return layout

    def _grouped(self, device: str) -> GroupedShapes | None:
        if not self.traits.takes_matrices:
            return None
        return group_shapes(self._build, self.shapes, self.dtype, device, self.config)

    @staticmethod
    def _storage(layout: FlatLayout, flat: Flat) -> str:
        return layout.specs[flat.slots[0].param].storage

    def _plain_specs(self, device: str) -> list[ParamSpec]:
        name = str(self.dtype).removeprefix("torch.")
        specs = []
        for param, shape in self.shapes:
            stride = dense_stride(shape, torch.empty(shape, device="meta").stride())
            specs.append(ParamSpec(param, shape, stride, name, device, 0))
        return specs

    def _state_itemsize(self, flat: Flat) -> float:
        """Return the bytes of states and masters of an element of a shard."""
        return self._state_itemsizes.get(
            self._storage(self.layout, flat), self.traits.state_itemsize
        )

    def _lay_out(self, specs: Sequence[ParamSpec], device: str) -> FlatLayout:
        cap = bucket_nbytes(
            self.config.bucket_cap_mb,
            self.moves,
            world_size=self.shards,
            device_type=device,
            overlaps=self.overlaps_grads or self.overlaps_params,
            payload_nbytes=sum(spec.numel for spec in specs) * self.dtype.itemsize,
        )
        return FlatLayout.build(
            specs, world_size=self.shards, bucket_nbytes=cap, granularity=self.traits.granularity
        )

    # Memory

    @property
    def _state_nbytes(self) -> float:
        """Bytes of states and masters of all ranks of a row."""
        return sum(flat.numel * self._state_itemsize(flat) for flat in self.layout.flats)

    def _memory(self, padded: int) -> dict[str, int]:
        memory = self._without_staging(padded)
        if self.shards > 1:
            memory |= self._staging()
        return {name: nbytes for name, nbytes in memory.items() if nbytes}

    def _without_staging(self, padded: int) -> dict[str, int]:
        traits, item = self.traits, self.dtype.itemsize
        shard = padded // self.shards
        memory = {"parameters": padded * item}
        if traits.param_itemsize > item and self.shards > 1:
            sizes = [bucket.numel for bucket in self.layout.buckets]
            memory["what parameters travel in"] = sum(map(self._param_nbytes, sizes))
        if self.config.stage == 2 and self.shards > 1:
            memory["gradients, this rank's shard"] = shard * _MASTER_NBYTES
        else:
            memory["gradients"] = padded * item
        if traits.keeps_reduced:
            memory["reduced gradients that a step keeps"] = shard * _MASTER_NBYTES
        memory["optimizer states and masters"] = round(self._state_nbytes / self.shards)
        return memory

    def _temporary_nbytes(self, padded: int) -> dict[str, int]:
        """Return the bytes that are held in backward only, and in a step, by kind."""
        largest = max(math.prod(shape) for _, shape in self.shapes)
        found = {"backward: the largest fresh gradient": largest * self.dtype.itemsize}
        is_clipped = self.traits.keeps_reduced or self.config.stage == 2
        kept = 0 if is_clipped else padded // self.shards * _MASTER_NBYTES
        gathered = 0
        if self.shards > 1 and self._copies_gathered:
            gathered = sum(self._param_nbytes(b.numel) for b in self.layout.buckets) // self.shards
        found["step: copies that HCCL gathers from"] = gathered
        exchange = 0 if self._exchange is None else self._exchange.peak_nbytes
        found["step: exchange of matrices"] = exchange
        found["step, where clip_grad_norm() is called"] = max(gathered, exchange) + kept
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    def _building(self, padded: int, device: str) -> int:
        """Return the most bytes while parameters move, and once gradients and states are there.

        On the CPU a flat buffer takes memory as it is written, and each parameter is freed once it
        has moved. A device without room for old and new moves them through the host.
        """
        item = self.dtype.itemsize
        numels = [math.prod(shape) for _, shape in self.shapes]
        moving = padded + (max(numels) if device == "cpu" else sum(numels))
        built = sum(self._without_staging(padded).values())
        return max(moving * item, built)

    def _staging(self) -> dict[str, int]:
        """Return the bytes of persistent send and receive buffers."""
        numels = [bucket.numel for bucket in self.layout.buckets]
        largest, num = max(numels), len(numels)
        if self.config.stage == 2:
            num_received = num_sent = num_in_flight(numels)
        elif self.overlaps_grads:
            num_received, num_sent = num + 1, num
        else:
            num_received, num_sent = min(IN_FLIGHT, num), min(IN_FLIGHT + 1, num)
        sent = self._grad_nbytes(largest)
        received = sent * self._received_share()
        is_cast = self.config.stage == 2 or sent != largest * self.dtype.itemsize
        staging = {"gradients that arrive": round(num_received * received)}
        if is_cast:
            staging["gradients that leave"] = num_sent * sent
        if self._is_copied():
            staging["copies of gradients, for zero-copy"] = num_received * sent
        if self.replicas > 1:
            part = round_up(largest // self.shards, self.replicas) * self._grad_itemsize()
            staging["sums over rows"] = num_received * 4 * part
        return staging

    def _is_copied(self) -> bool:
        """Return whether HCCL may change the input of a reduce-scatter, which is then copied."""
        is_zero_copy = traits_of("hccl").changes_inputs is True
        return is_zero_copy and self.progress is AsyncModel.ORDERED and not self._adds_up_parts()

    def _received_share(self) -> float:
        """Return the part of a bucket that the communicator's receive buffers hold."""
        if self.progress is not AsyncModel.ORDERED:
            return (self.shards - 1) / self.shards
        return 1.0 if self._adds_up_parts() else 1 / self.shards

    def _adds_up_parts(self) -> bool:
        """Return whether each rank receives unsummed parts, instead of the backend's sum."""
        low = self.config.grad_sync_dtype or self.config.grad_sync_bits
        return self.progress is not AsyncModel.ORDERED or low not in (None, torch.float32)

    # Traffic

    def _grad_itemsize(self) -> int:
        dtype = self.config.grad_sync_dtype or self.dtype
        return dtype.itemsize

    def _grad_nbytes(self, numel: int) -> int:
        """Return the bytes of a bucket of gradients as it is sent."""
        if self.config.grad_sync_bits is not None:
            quantizer = BlockQuantizer(self.config.grad_sync_bits)
            return self.shards * quantizer.part_nbytes(numel // self.shards)
        return numel * self._grad_itemsize()

    def _param_nbytes(self, numel: int) -> int:
        """Return the bytes of a bucket of parameters as it is sent."""
        config = self.config
        if self.dtype != torch.float32:
            return numel * self.dtype.itemsize
        if config.param_sync_bits is not None:
            quantizer = BlockQuantizer(config.param_sync_bits)
            return self.shards * quantizer.part_nbytes(numel // self.shards, CHECK_NBYTES)
        return numel * (config.param_sync_dtype or self.dtype).itemsize

    def _bucket(self, bucket: Bucket, padded: int) -> BucketCost:
        outside, numel = (self.shards - 1) / self.shards, bucket.numel
        reduce = self._grad_nbytes(numel) * outside
        reduce += self._along_columns(numel)
        states = self._state_itemsize(self.layout.flats[bucket.flat])
        touched = 2 * states + 2 * self.traits.param_itemsize
        parts = (
            self.shards * self._grad_itemsize() if self._adds_up_parts() else self.dtype.itemsize
        )
        return BucketCost(
            share=numel / padded,
            reduce=reduce,
            gather=self._param_nbytes(numel) * outside,
            update=numel / self.shards * (touched + parts),
            whole_update=numel * (touched + self.dtype.itemsize),
        )

    def _along_columns(self, numel: int) -> float:
        """Return the bytes that a rank sends to sum a bucket over rows."""
        part = round_up(numel // self.shards, self.replicas) * self._grad_itemsize()
        return 2 * part * (self.replicas - 1) / self.replicas

    def _collectives(self) -> list[Collective]:
        if self.shards * self.replicas == 1:
            return []
        numels = [bucket.numel for bucket in self.layout.buckets]
        outside = (self.shards - 1) / self.shards
        found = []

        def add(kind: str, axis: Axis, number: int, payload: float, sent: float) -> None:
            found.append(Collective(kind, axis, number, round(payload), round(sent)))

        if self.shards > 1:
            nbytes = sum(map(self._grad_nbytes, numels))
            add("reduce-scatter of gradients", "shard", len(numels), nbytes, nbytes * outside)
        if self.replicas > 1:
            sent = sum(map(self._along_columns, numels))
            payload = sent * self.replicas / (self.replicas - 1)
            add("sums over rows", "replicate", 2 * len(numels), payload, sent)
        if self._exchange is not None:
            found.append(self._exchange.collective())
        if self.shards > 1:
            nbytes = sum(map(self._param_nbytes, numels))
            add("all-gather of parameters", "shard", len(numels), nbytes, nbytes * outside)
        small = self.traits.small_numels(self.shapes)
        if self.overlaps_grads:
            # Agreement on buckets that changed after they were sent, or were sent less often, and
            # on parameters without a gradient.
            num_counts = NUM_COUNTS if self.config.stage == 2 else 0
            small.append(len(numels) + len(self.shapes) + num_counts)
        if self.progress is AsyncModel.ORDERED:
            small.append(6)  # NCCL's and HCCL's ranks compare their calls
        if small:
            total = 4 * sum(small)
            every = self.shards * self.replicas
            add("small all-reduces", "all", len(small), total, 2 * total * (every - 1) / every)
        return found
