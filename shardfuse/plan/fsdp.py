"""Memory and traffic of FSDP2 under our optimizers: fully_shard() of each layer and of the root.

torch decides which layers are gathered and when, so this follows torch 2.13's fully_shard() with
its default arguments. A layer is a name up to its first number (``encoder.layer.3.``). All other
parameters are the root's, which stay gathered from forward to backward.

[Note: the most at once] In backward, FSDP2 computes with one gathered layer and gathers the next,
through a buffer that it copies out. Meanwhile the gradients of the last layer are in a buffer of
their own for the reduce-scatter, and those of the present one, and of the root, are complete. That
is a model of its memory, which allocators exceed; no test has measured it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from shardfuse.config import ShardConfig
from shardfuse.engine.dtensors import staged_numel
from shardfuse.layout import BLOCK, round_up
from shardfuse.optim.dtensors import config_for
from shardfuse.plan.budget import (
    MATRIX,
    Budget,
    OptimizerTraits,
    check_world,
    formulas,
    group_shapes,
    probe_optimizer,
)
from shardfuse.plan.matrices import Collective, ExchangeCost
from shardfuse.plan.models import NamedShape, count_elements


def plan_fsdp(
    shapes: Sequence[NamedShape],
    build: Callable[..., Any],
    *,
    world_size: int,
    num_replicas: int = 1,
    dtype: torch.dtype = torch.float32,
    travels_as: torch.dtype | None = None,
    device: str = "npu",
    sharding: ShardConfig | None = None,
) -> Budget:
    """Return the budget of training under FSDP2 on so many ranks; buckets are its layers.

    Args:
        shapes: (name, shape) of each parameter.
        build: returns the optimizer for (params, sharding=...), such as ``ShardedLamb``.
        world_size: number of all ranks.
        num_replicas: rows of an HSDP mesh; 1: all ranks shard.
        dtype: dtype of the parameters that the optimizer has.
        travels_as: MixedPrecisionPolicy(param_dtype=), in which parameters are gathered and
            gradients reduced; None: as they are.
        device: "npu", "cuda" or "cpu", which decides which shards are staged.
        sharding: as for the optimizer.

    Raises:
        ValueError: ``world_size`` is no multiple of ``num_replicas``, or less than 1; or an option
            of ``sharding`` means nothing under FSDP2.
    """
    check_world(world_size, num_replicas)
    config = sharding or ShardConfig()
    config_for(config)  # raises
    shards = world_size // num_replicas
    if shards == 1:
        raise ValueError(
            f"Invalid world_size: {world_size} ranks in {num_replicas} rows of one rank, so FSDP2 "
            "shards nothing. Give more ranks, or plan without it."
        )
    traits = probe_optimizer(build, dtype, config)
    layers = _layers(shapes, shards)
    own, small = sum(layers.values()), traits.small_numels(shapes)
    item, sent_item = dtype.itemsize, (travels_as or dtype).itemsize
    numel = count_elements(shapes)
    itemsizes, exchange = {}, None
    if traits.takes_matrices:
        grouped = group_shapes(build, shapes, dtype, device, config)
        itemsize = probe_optimizer(build, dtype, config, MATRIX).state_itemsize
        itemsizes = dict.fromkeys(grouped.matrices, itemsize)
        own_numel = sum(_own_numel(shape, shards) for name, shape in shapes if name in itemsizes)
        exchange = grouped.cost(world_size, own_numel, num_replicas)
    needs_all = len(small) > 0 or exchange is not None
    if needs_all and device != "cpu":
        small.append(6)  # NCCL's and HCCL's ranks compare their calls
    states = _state_nbytes(shapes, shards, traits, itemsizes, dtype, device)
    return Budget(
        num_params=len(shapes),
        numel=numel,
        num_shards=shards,
        num_replicas=num_replicas,
        padded_numel=own * shards,
        num_buckets=len(layers),
        bucket_nbytes=max(layers.values()) * shards * sent_item,
        memory={
            "parameters": own * item,
            "gradients": own * item,
            "optimizer states and masters": states,
        },
        for_a_time=_temporary_nbytes(layers, shards, sent_item, exchange),
        building_nbytes=own * item + states,  # of a model that is made on the meta device
        published=formulas(numel, world_size, item, traits.state_itemsize),
        collectives=tuple(_collectives(layers, shards, num_replicas, sent_item, small, exchange)),
        buckets=(),
        overlaps=(True, True),
        needs_all=needs_all,
        exchange=exchange,
    )


def _layers(shapes: Sequence[NamedShape], shards: int) -> dict[str, int]:
    """Return {layer: elements of one rank, with padding}; the root is "" and comes last."""
    found: dict[str, int] = {}
    for name, shape in shapes:
        found[_layer_of(name)] = found.get(_layer_of(name), 0) + _own_numel(shape, shards)
    root = found.pop("", None)
    return found if root is None else {**found, "": root}


def _layer_of(name: str) -> str:
    parts = name.split(".")[:-1]
    prefixes = accumulate(parts, lambda left, right: f"{left}.{right}")
    return next((p for p, part in zip(prefixes, parts, strict=True) if part.isdigit()), "")


def _own_numel(shape: tuple[int, ...], shards: int) -> int:
    """Return the elements of one rank: rows are dealt out evenly, and the last ranks pad."""
    return -(-shape[0] // shards) * math.prod(shape[1:]) if shape else 1


def _state_nbytes(
    shapes: Sequence[NamedShape],
    shards: int,
    traits: OptimizerTraits,
    itemsizes: Mapping[str, float],
    dtype: torch.dtype,
    device: str,
) -> int:
    """Return the bytes of states, masters and staging buffers on the first rank.

    ``itemsizes`` are the bytes of an element's states of those that have others than ``traits``.
    """
    nbytes = 0.0
    for name, shape in shapes:
        numel = _own_numel(shape, shards)
        has_tail = traits.granularity == "row" and numel % BLOCK > 0
        if numel < staged_numel(device) or has_tail:
            numel = round_up(numel, BLOCK)
            nbytes += numel * 2 * dtype.itemsize  # of parameters and of gradients
        nbytes += numel * itemsizes.get(name, traits.state_itemsize)
    return round(nbytes)


def _temporary_nbytes(
    layers: dict[str, int], shards: int, item: int, exchange: ExchangeCost | None
) -> dict[str, int]:
    """Return the bytes beside the shards for a time; see [Note: the most at once]."""
    root = layers.get("", 0)
    largest, next_one, *_ = [*sorted((n for k, n in layers.items() if k), reverse=True), 0, 0]
    gathered = (root + largest + 2 * next_one) * shards * item
    reduced = (root + largest + next_one) * shards * item
    found = {
        "forward: gathered layers": gathered,
        "backward: gathered layers, their gradients": gathered + reduced,
    }
    if exchange is not None:
        found["step: exchange of matrices"] = exchange.peak_nbytes
    return found


def _collectives(
    layers: dict[str, int],
    shards: int,
    replicas: int,
    item: int,
    small: Sequence[float],
    exchange: ExchangeCost | None,
) -> list[Collective]:
    part, num, every = sum(layers.values()) * item, len(layers), shards * replicas
    payload, sent = part * shards, part * (shards - 1)
    found = [Collective("reduce-scatter of gradients", "shard", num, payload, sent)]
    if replicas > 1:
        sent = round(2 * part * (replicas - 1) / replicas)
        found.append(Collective("sums over rows", "replicate", num, part, sent))
    twice = 2 * part - layers.get("", 0) * item  # the root is gathered once
    number, kind = 2 * num - ("" in layers), "all-gather of parameters"
    found.append(Collective(kind, "shard", number, twice * shards, twice * (shards - 1)))
    if exchange is not None:
        found.append(exchange.collective("all" if replicas > 1 else "shard"))
    if small:
        total = 4 * sum(small)
        sent = round(2 * total * (every - 1) / every)
        found.append(Collective("small all-reduces", "all", len(small), round(total), sent))
    return found
