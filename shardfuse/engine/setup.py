"""Checks the user's parameters and groups, and makes specs of them: names, order, policies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardfuse.buffers import internal_format
from shardfuse.config import ShardConfig
from shardfuse.engine.ddp import unwrapped
from shardfuse.engine.dtensors import is_dtensor, local_of
from shardfuse.layout import ITEMSIZE, ParamSpec, dense_stride
from shardfuse.rules import Member, UpdateRule
from shardfuse.runtime import stacklevel_of_caller

Groups = Sequence[Mapping[str, Any]]


def as_list(params: Any) -> list[Any]:
    """Return the ``params`` of an optimizer as a list; for a module, its named parameters.

    Raises:
        TypeError: a state dict or one tensor, in place of parameters; or a set.
        ValueError: there are none, or a group has none.
    """
    if isinstance(params, torch.nn.Module):
        named = list(unwrapped(params).named_parameters())
        if not named:
            raise ValueError(f"The model ({type(params).__name__}) has no parameters.")
        if hasattr(unwrapped(params), "reshard") and not any(is_dtensor(p) for _, p in named):
            raise ValueError(
                f"The model ({type(params).__name__}) is sharded by FSDP2, and unsharded now, as "
                "after a forward without a backward. Call model.reshard() first."
            )
        return named
    if isinstance(params, Tensor):
        raise TypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, but "
            "is one Tensor. Pass model.named_parameters(), or a list of tensors."
        )
    if isinstance(params, Mapping):
        raise TypeError(
            f"params is a {type(params).__name__}. Pass model.named_parameters(), or a list of "
            'dicts, one for each group: [{"params": ..., "lr": ...}].'
        )
    ordered({"params": params})
    members = list(params)
    if not members:
        raise ValueError(
            "optimizer got an empty parameter list. A generator such as model.parameters() can be "
            "read once: pass model.named_parameters() itself."
        )
    for index, group in enumerate(members):
        if isinstance(group, Mapping) and "params" not in group:
            raise ValueError(f'Parameter group {index} has no "params", but {list(group)}.')
    return members


def ordered(group: dict[str, Any]) -> dict[str, Any]:
    """Return ``group``; TypeError if its parameters are a set, which has another order per rank."""
    if isinstance(group, Mapping) and isinstance(group.get("params"), set | frozenset):
        raise TypeError(
            "optimizer parameters need to be organized in ordered collections, but are a set: each "
            "rank would take others for the same. Pass model.named_parameters(), or a list."
        )
    return group


def common_device(groups: Groups) -> torch.device:
    """Return the device of all parameters; the CPU where there are none.

    Raises:
        TypeError: a parameter is on the meta device, which no collective supports.
        ValueError: parameters are on several devices.
    """
    device: torch.device | None = None
    for index, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            if param.device == device:
                continue
            if param.device.type == "meta":
                name = _names(group, index)[position]
                raise TypeError(
                    f"Parameter {name} is on the meta device. Materialise the model first, as by "
                    "model.to_empty(device=...), and give it its values."
                )
            if device is not None:
                name = _names(group, index)[position]
                raise ValueError(
                    f"Parameter {name} is on {param.device}, others are on {device}. Give one "
                    "optimizer the parameters of one device."
                )
            device = param.device
    return device or torch.device("cpu")


def payload_nbytes(groups: Groups) -> int:
    """Return the bytes of all parameters."""
    return sum(p.numel() * p.element_size() for group in groups for p in group["params"])


def named(groups: Groups) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) of every parameter of ``groups``."""
    return [
        (names[position], param)
        for index, group in enumerate(groups)
        for names in (_names(group, index),)
        for position, param in enumerate(group["params"])
    ]


def read(groups: Groups, first_group: int, rule: UpdateRule) -> list[tuple[Tensor, ParamSpec]]:
    """Return (parameter, spec) of every parameter of the groups from ``first_group`` on.

    Raises:
        ValueError: a hyper-parameter is out of range, parameters share memory, or are on several
            devices.
        TypeError: a parameter is not a dense fp32, fp16 or bf16 tensor, or in an internal format.
    """
    common_device(groups)
    added: list[tuple[Tensor, ParamSpec]] = []
    texts: dict[Any, tuple[str, str]] = {}
    names = {name for name, _ in named(groups[:first_group])}
    for index in range(first_group, len(groups)):
        group = groups[index]
        rule.check(group)
        maths: dict[str, str] = {}  # by policy
        storage = rule.storage(group)
        for param, name in zip(group["params"], _names(group, index), strict=True):
            _check_memory_format(param, name)
            key = param.dtype, param.device, param.layout
            if key not in texts:
                _check_dtype_and_layout(param, name)
                texts[key] = str(param.dtype).removeprefix("torch."), str(param.device)
            dtype, device = texts[key]
            if name in names:
                raise ValueError(
                    f"The parameter name {name} is given twice. Checkpoints and error messages use "
                    "names: prefix the names of each model."
                )
            names.add(name)
            policy = rule.policy(name, "param_names" in group, tuple(param.shape), group)
            if policy not in maths:
                maths[policy] = str(rule.settings(group, policy, 1).flags)
            spec = ParamSpec(
                name=name,
                shape=tuple(param.shape),
                stride=dense_stride(param.shape, param.stride()),
                dtype=dtype,
                device=device,
                group=index,
                policy=policy,
                frozen=not param.requires_grad and param.grad is None,
                math=maths[policy],
                storage=storage,
            )
            added.append((param, spec))
    _check_no_overlap([pair for pair in added if pair[1].stride == pair[0].stride()])
    return added


def warn(
    rank: int, rule: UpdateRule, groups: Groups, first_group: int, specs: Sequence[ParamSpec]
) -> None:
    """Warn of settings that are valid but unlikely to be intended. The first rank warns, once.

    ``specs`` are those of all ``groups``. Warnings that applied without the groups from
    ``first_group`` on are not repeated. If a filter turns warnings into errors, this raises: call
    it where the peers learn of an error.
    """
    if rank != 0:
        return
    members = [
        (s.group, Member(s.name, len(s.shape), s.policy, groups[s.group]))
        for s in specs
        if not s.frozen and s.numel > 0
    ]
    before = rule.warnings([member for group, member in members if group < first_group])
    for kind, text in rule.warnings([member for _, member in members]).items():
        if kind not in before:
            warnings.warn(text, UserWarning, stacklevel=stacklevel_of_caller())


def describe(
    groups: Groups,
    first_group: int,
    rule: UpdateRule,
    config: ShardConfig,
    added: Sequence[tuple[Tensor, ParamSpec]],
) -> list[str]:
    """Return the lines that must be equal on all ranks, one per parameter and per group."""
    lines = [spec.describe() for _, spec in added]
    for index in range(first_group, len(groups)):
        options = {
            key: value
            for key, value in groups[index].items()
            if key not in ("params", "param_names") and not isinstance(value, Tensor)
        }
        lines.append(f"options of group {index}: {options}")
    # Ranks on different machines may choose different kernels. A process group or mesh is an object
    # of one process.
    own = ("kernel", "process_group", "mesh")
    shared = [f.name for f in fields(config) if f.name not in own]
    chosen = " ".join(f"{name}={getattr(config, name)}" for name in shared)
    lines.append(f"{rule.describe()} {chosen}{_mesh_text(config)}")
    return lines


def construction_label(config: ShardConfig, error: Exception | None) -> str:
    """Return the name of the region that builds an optimizer; ``error``: why it has no options.

    The name has the options that decide which collectives follow. Ranks with different options
    fail when they compare names, before one of them launches a collective that its peers do not.
    """
    if error is not None:
        return f"building an optimizer, which fails: {type(error).__name__}: {error}"
    chosen = f"collectives={config.collectives}{_mesh_text(config)}"
    return f"building an optimizer with {chosen}"


def _mesh_text(config: ShardConfig) -> str:
    if config.mesh is None:
        return ""
    return f" mesh={config.mesh.mesh.tolist()} {config.mesh.mesh_dim_names}"


def _names(group: Mapping[str, Any], index: int) -> Sequence[str]:
    """Return the names of the parameters of ``group``, the ``index``-th; perhaps more names.

    torch.optim.Optimizer sees to it that a new group has one per parameter. DeepSpeed replaces the
    parameters of a group by one flat.
    """
    numbers = range(len(group["params"]))
    return group.get("param_names") or [f"param_groups[{index}][{i}]" for i in numbers]


_DTYPES = {getattr(torch, name) for name in ITEMSIZE}


def _check_memory_format(param: Tensor, name: str) -> None:
    """Raise TypeError if sizes and strides of ``param`` do not describe its memory."""
    if hasattr(param, "ds_tensor"):
        raise TypeError(
            f"Parameter {name} is partitioned by DeepSpeed's ZeRO stage 3, which shards the "
            "optimizer states, too. Use stage 1 or 2, or train without deepspeed.zero.Init()."
        )
    number = internal_format(param)
    if number is not None:
        raise TypeError(
            f"Parameter {name} has Ascend's internal format {number}, in which its sizes and "
            "strides do not describe the memory. Set torch.npu.config.allow_internal_format = "
            "False before the model is built, or convert the parameter: "
            "p.data = torch_npu.npu_format_cast(p.data, 2)."
        )


def _check_dtype_and_layout(param: Tensor, name: str) -> None:
    """Raise TypeError if no flat has parameters of the dtype and layout of ``param``."""
    if param.layout != torch.strided:
        raise TypeError(f"Parameter {name} is {param.layout}; shardfuse needs dense parameters.")
    if param.dtype not in _DTYPES:
        raise TypeError(
            "Fused optimizer's parameters must be either float32, float16 or bfloat16, but "
            f"received {param.dtype} ({name}). {_dtype_remedy(param)}"
        )


def _dtype_remedy(param: Tensor) -> str:
    """Return the remedy for a parameter of an unsupported dtype."""
    if param.is_complex():  # model.float() does not convert it
        return (
            "Keep it as a real parameter, torch.nn.Parameter(torch.view_as_real(w)), and use "
            "torch.view_as_complex() of that in forward."
        )
    if not param.is_floating_point():  # nor integers
        return "It cannot have a gradient: leave it out, and make it a buffer of the model."
    return "Convert the model, e.g. with model.float()."


def _check_no_overlap(added: Sequence[tuple[Tensor, ParamSpec]]) -> None:
    """Raise ValueError if two parameters overlap: slots of their own would silently untie them."""
    extents = sorted(
        (local.data_ptr(), local.data_ptr() + local.nbytes, spec.name)
        for param, spec in added
        if (local := local_of(param) if is_dtensor(param) else param).numel() > 0
    )
    for (_, stop, first), (start, _, second) in pairwise(extents):
        if start < stop:
            raise ValueError(
                f"Parameters {first} and {second} share memory. Tie them by using one Parameter "
                "object in both places, and pass it once."
            )
