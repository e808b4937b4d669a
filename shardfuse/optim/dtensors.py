"""Optimizers over parameters that torch has sharded: FSDP2's fully_shard(), tensor parallelism.

torch lays out the parameters, reduces the gradients and all-gathers the parameters. The rules, the
exact norms of whole tensors, the clips and the errors on every rank are shardfuse's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from shardfuse.agreement import gather_checksums
from shardfuse.comm import Communicator
from shardfuse.config import ShardConfig
from shardfuse.engine import dtensor_state
from shardfuse.engine.ddp import gathered_by_fsdp2
from shardfuse.engine.dtensor_state import DTensorStates
from shardfuse.engine.dtensors import (
    DTensorShards,
    LocalShard,
    fingerprint_of_copies,
    is_dtensor,
    local_of,
    mesh_of,
    placements_of,
    shard_dim,
)
from shardfuse.engine.torch_state import OptimizerState
from shardfuse.layout import ParamSpec, dense_stride

Named = Sequence[tuple[str, Tensor]]

_BY_TORCH = "Remove it: FSDP2 does this, as fully_shard()'s own arguments say"

_OPTIONS: dict[str, str] = {
    "stage": "Remove it: FSDP2 shards gradients and parameters, too",
    "process_group": "Remove it: the parameters' device mesh names the ranks",
    "mesh": "Remove it, and give fully_shard() the mesh",
    "bucket_cap_mb": "Remove it: each module that fully_shard() is called on is one message",
    "grad_sync_dtype": "Set MixedPrecisionPolicy(reduce_dtype=) of fully_shard()",
    "param_sync_dtype": "Set MixedPrecisionPolicy(param_dtype=) of fully_shard()",
    "grad_sync_bits": "Remove it: FSDP2 sends gradients in the reduce_dtype of its policy",
    "param_sync_bits": "Remove it: FSDP2 sends parameters in the param_dtype of its policy",
    "error_feedback": "Remove it: nothing is rounded here",
    "overlap_grad_sync": _BY_TORCH,
    "overlap_param_sync": _BY_TORCH,
    "debug_sync": _BY_TORCH,
    "grads_are_reduced": "Remove it: FSDP2 averages gradients",
    "broadcast_params": "Remove it: ranks hold different shards, which nothing broadcasts",
    "broadcast_buffers": "Remove it: buffers of the model are not synchronised here",
    "consolidate_every": "Remove it, and save by shardfuse.checkpoint.save(), or save "
    "get_optimizer_state_dict() of torch.distributed.checkpoint.state_dict, on all ranks",
}
"""Options of a task that torch does here: {name: remedy}."""

_STATE_DICT = (
    "Use shardfuse.checkpoint.save() and load(); or get_optimizer_state_dict() and "
    "set_optimizer_state_dict() of torch.distributed.checkpoint.state_dict, with "
    "full_state_dict=True for whole tensors, and torch.distributed.checkpoint.save() and load()."
)

_COMBINED = "Use p.grad and the parameters themselves: nothing combines them here."

_METHODS: dict[str, str] = {
    "broadcast_buffers()": "Broadcast the buffers by torch.distributed.broadcast().",
    "consolidate_state_dict()": _STATE_DICT,
    "sharded_state_dict()": _STATE_DICT,
    "load_sharded_state_dict()": _STATE_DICT,
    "torch.distributed.algorithms.Join": "FSDP2 has no support for uneven inputs: give every rank "
    "the same number of batches.",
    "get_combined_params()": _COMBINED,
    "get_combined_grads()": _COMBINED,
    "torch_npu's GradScaler": "Use shardfuse.ShardedGradScaler or torch.amp.GradScaler.",
}
"""Methods that need flat buffers of shardfuse's own: {name: remedy}."""


def are_sharded_by_torch(params: Named) -> bool:
    """Return whether these are DTensors.

    Raises:
        TypeError: some are and some are not, or one has a placement that is not supported.
        ValueError: one is not on this rank, is on the CPU beside a mesh of accelerators, or no mesh
            has the ranks of all.
    """
    sharded = [(name, param) for name, param in params if is_dtensor(param)]
    if not sharded:
        position = gathered_by_fsdp2([param for _, param in params])
        if position is not None:
            raise TypeError(
                f"Parameter {params[position][0]} is a copy that FSDP2 has gathered for a forward, "
                "and frees again: its updates would be lost. Call model.reshard() first, and pass "
                "the parameters that the model has then."
            )
        return False
    plain = [name for name, param in params if not is_dtensor(param)]
    if plain:
        more = f" and {len(plain) - 1} more" if len(plain) > 1 else ""
        raise TypeError(
            f"Parameter {plain[0]}{more} is a plain tensor, and {sharded[0][0]} a DTensor (FSDP2, "
            "or tensor parallelism). Shard it, too, as by fully_shard() of the root module or by "
            "distribute_tensor() with Replicate(); or give the plain parameters an optimizer of "
            "their own, which averages their gradients. If fully_shard() did shard it, it is "
            "unsharded now, as after a forward without a backward: call model.reshard() first."
        )
    for name, param in sharded:
        _check(name, param)
    main = main_mesh(params)
    ranks = set(main.mesh.flatten().tolist())
    for name, param in sharded:
        if not ranks >= set(mesh_of(param).mesh.flatten().tolist()):
            raise ValueError(
                f"Parameter {name} is on {mesh_of(param)}, others are on {main}, and neither mesh "
                "has all ranks of the other. Give the parameters of each mesh an optimizer."
            )
    return True


def _check(name: str, param: Tensor) -> None:
    mesh = mesh_of(param)
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"Parameter {name} is on {mesh}, which this rank is not in. Give each rank's optimizer "
            "the parameters that the rank has a part of."
        )
    for placement in placements_of(param):
        try:
            shard_dim(placement)
        except TypeError:
            raise TypeError(
                f"Parameter {name} is placed as {placement}: ranks hold different values that are "
                "still to be added up. Redistribute it to Shard() or Replicate()."
            ) from None
    local = local_of(param)
    dense = dense_stride(tuple(local.shape), local.stride())
    if local.numel() and any(
        size > 1 and stride != whole
        for size, stride, whole in zip(local.shape, local.stride(), dense, strict=True)
    ):
        raise TypeError(
            f"Parameter {name} has a local tensor with gaps: {tuple(local.shape)} with strides "
            f"{local.stride()}. Give DTensor.from_local() a contiguous tensor."
        )
    if param.device.type != mesh.device_type:
        raise ValueError(
            f"Parameter {name} is on {param.device.type}, its mesh on {mesh.device_type}. "
            "CPUOffloadPolicy is not supported: call fully_shard() without it, or use torch.optim."
        )


def main_mesh(params: Named) -> Any:
    """Return the largest mesh of the parameters: the ranks that share the optimizer."""
    return max((mesh_of(param) for _, param in params), key=lambda mesh: int(mesh.size()))


def config_for(config: ShardConfig) -> ShardConfig:
    """Return ``config`` as it applies where torch shards.

    Raises:
        ValueError: an option of a task that torch does here.
    """
    defaults = ShardConfig()
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        is_default = value == getattr(defaults, name)
        if name == "grads_are_reduced":
            is_default = value is not False
        if not is_default and name in _OPTIONS:
            raise ValueError(
                f"Invalid {name}: {value!r} for parameters that are DTensors (FSDP2, or tensor "
                f"parallelism). {_OPTIONS[name]}."
            )
    return replace(config, grads_are_reduced=True, broadcast_params=False)


def describe(params: Named) -> list[str]:
    """Return lines that must be equal on all ranks."""
    return [
        f"{name} is placed as {placements_of(param)} over {tuple(mesh_of(param).shape)}"
        for name, param in params
    ]


def check_copies(
    added: Sequence[tuple[Tensor, ParamSpec]], main: Any, comm: Communicator, device: torch.device
) -> None:
    """Check that parameters on a sub-mesh of ``main`` are copies on the other ranks. Collective.

    Raises:
        ValueError: they have other values there: these are other parameters, such as experts.
    """
    first_rank = int(main.mesh.flatten()[0])
    shards = [LocalShard(i, param, spec, first_rank) for i, (param, spec) in enumerate(added)]
    if all(shard.mesh == main for shard in shards):
        return
    place, values = fingerprint_of_copies(shards, main)
    places = gather_checksums(comm, device, place)
    found: dict[int, int] = {}
    for at, value in zip(places, gather_checksums(comm, device, values), strict=True):
        if found.setdefault(at, value) != value:
            shard = next(shard for shard in shards if shard.mesh != main)
            raise ValueError(
                f"Parameter {shard.spec.name} is on {shard.mesh}, others are on {main}. Its values "
                "differ on ranks that would have copies of it, or those of another such parameter "
                "do: the ranks hold parts of other tensors, as of other experts. Give the "
                "parameters of each mesh an optimizer of their own."
            )


class DTensorLayout:
    """The ExternalLayout of an optimizer over DTensors.

    Args:
        shards: of the parameters.
        optimizer_state: returns the source of state dicts.
    """

    def __init__(
        self, shards: DTensorShards, optimizer_state: Callable[[], OptimizerState]
    ) -> None:
        self._shards = shards
        self._optimizer_state = optimizer_state
        self.state: Any = DTensorStates(shards)

    def collect(self) -> dict[str, Any]:
        """Return torch's state dict; its tensors are DTensors and alias the states. Local."""
        return dtensor_state.collect(self.state, self._shards, self._optimizer_state())

    def prepared(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state dict of DTensors or whole tensors; return the function that loads it."""
        return dtensor_state.prepared(self._shards, self._optimizer_state(), state_dict)

    def check_available(self, what: str) -> None:
        """Raise RuntimeError if the method ``what`` needs flat buffers of shardfuse's own."""
        if what in _METHODS:
            raise RuntimeError(
                f"{what} is not available for parameters that are DTensors (FSDP2, or tensor "
                f"parallelism). {_METHODS[what]}"
            )
