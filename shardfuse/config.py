"""How the flat buffers are sharded: one frozen, validated record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

KernelChoice = Literal["auto", "eager", "compile"]
CollectivesChoice = Literal["auto", "pairwise", "native"]

_SYNC_DTYPES = {
    "grad_sync_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "param_sync_dtype": (torch.bfloat16, torch.float16),
}


_SYNC_BITS = {"grad_sync_bits": (8,), "param_sync_bits": (8, 4)}

_SWITCHES = (
    "grads_are_reduced",
    "broadcast_params",
    "report_overflow",
    "debug_sync",
    "error_feedback",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig:
    """Every choice about sharding, its communication and its kernels.

    A plain dict with the same keys is accepted wherever a ``ShardConfig`` is, so that it fits in a
    JSON file; dtypes may then be written as strings (``"float32"``).

    Raises:
        TypeError: an unknown key, or a value of the wrong type.
        ValueError: a value out of range.
    """

    stage: int = 1
    """ZeRO stage. 1: moments and fp32 masters are sharded, gradients live in a full flat buffer.

    2: gradients, too. Each is summed over ranks as soon as autograd has made it, in every backward
    outside no_sync(), and this rank keeps its shard of the sum, in fp32; ``p.grad`` is None then.
    step() uses them up, as zero_grad() would. All ranks run as many backwards; buckets under way
    take memory, so keep bucket_cap_mb at 1/32 of the gradients or less. One rank alone keeps all.
    """

    process_group: Any = None
    """Ranks to shard over; None is the default group, or this process alone where there is none and
    no launcher has started several; "alone" is this process alone in any case. An object with the
    methods of ``shardfuse.comm.Communicator`` is used as it is."""

    mesh: Any = None
    """A torch DeviceMesh of two dimensions, (replicate, shard), for hybrid sharding (HSDP).

    States and masters are sharded over the second alone, gradients summed over both: within a row
    of ranks as ever, and then each shard with the ranks that have its copies. ``process_group`` is
    then the group of all ranks of the mesh. None: all ranks shard.
    """

    bucket_cap_mb: float | Literal["auto"] = "auto"
    """Upper bound of one collective's payload in MiB. auto: 8 through gloo's sockets, where buckets
    overlap backward and forward and small ones begin sooner (4 to 25 took the same time within the
    noise of two hosts at 1 Gbit/s); else 25, the fastest measured on one host.

    One rank alone sends nothing and has one bucket (AdamP, which keeps products of a bucket, more).
    """

    grad_sync_dtype: torch.dtype | None = None
    """Dtype in which gradients travel. bf16 and fp16 are added up in fp32 where they arrive.

    None is the parameter's own dtype, in which a backend may add them up, too.
    """

    param_sync_dtype: torch.dtype | None = None
    """Dtype in which updated fp32 parameters travel, bf16 or fp16; None is their own.

    Half the bytes of an all-gather. On all ranks parameters are then rounded to it by every step,
    those without a gradient too; masters in fp32 are sharded, and are part of the state. It takes
    2 bytes an element more, and 4 / W. Parameters of lower precision travel as they are, and one
    rank alone rounds nothing.
    """

    grad_sync_bits: int | None = None
    """8: gradients travel in 8 bits an element and one scale for each block of 512, in place of
    ``grad_sync_dtype``; None: not so.

    Each rank adds up in fp32 what arrives, its own part unrounded. The error of an element is at
    most 1/254 of the largest magnitude in its block. Tensors then begin at whole blocks, and an
    overflow makes all of its block non-finite.
    """

    param_sync_bits: int | None = None
    """8 or 4: updated fp32 parameters travel as differences to what all ranks have, in so many bits
    an element and one scale for each block of 512, in place of ``param_sync_dtype``; None: not so.

    What rounding leaves over goes into the next difference; it is sharded (4 / W bytes an
    element) and part of the state, as "param_error". Ranks must have equal parameters, because only
    differences travel: each step compares checksums of all of them. Load or edit parameters on all
    ranks alike. Parameters of lower precision travel as they are; one rank alone rounds nothing.
    """

    error_feedback: bool = True
    """Whether what ``param_sync_bits`` rounds off goes into the next difference, or is lost."""

    overlap_grad_sync: bool | Literal["auto"] = "auto"
    """Buckets of gradients leave under backward, as soon as they are complete.

    A gradient that changes afterwards is sent anew, so that steps are the same bit for bit; run all
    backwards of a step but the last inside no_sync(). auto: where bytes move while a rank computes
    and nothing was measured to be slower, which is gloo through sockets. It keeps what arrives of
    all buckets: (W - 1) / W of the gradients' bytes there, 1 / W on other backends.
    """

    overlap_param_sync: bool | Literal["auto"] = "auto"
    """step() returns while updated parameters are under way; who reads one waits for it.

    See [Note: under way] in engine/gather.py for what counts as reading. auto: as above.
    """

    debug_sync: bool = False
    """Wait for every collective where it is launched: whether overlap is at fault."""

    grads_are_reduced: bool = False
    """``p.grad`` is the mean over ranks already, as under DistributedDataParallel."""

    clip_grad_norm: float | None = None
    """Every step() scales the mean gradient to at most this L2 norm, as clip_grad_norm() before it
    would: for loops of others, which call step() alone. One all-reduce of a float per flat."""

    broadcast_params: bool = True
    """Copy the first rank's parameter values to all ranks at construction."""

    collectives: CollectivesChoice = "auto"
    """native: the backend's own; pairwise: sends between pairs of ranks where those are faster,
    which is gloo on the CPU; auto: and there, ranks on one host read each other's memory."""

    kernel: KernelChoice = "auto"
    """eager: over cache-sized tiles; compile: torch.compile; auto: picks, and logs the reason."""

    report_overflow: bool = False
    """Log which parameter, on which rank, made a gradient scaler skip a step; kept as
    ``last_overflow``. Costs nothing in other steps. Reduced gradients overflow on all ranks."""

    consolidate_every: int | None = None
    """After every so many calls of step(), bring the full state to the first rank's CPU memory.

    There ``if rank == 0: torch.save(optimizer.state_dict())`` works without a call on the other
    ranks, until the next step; between, and at the end of a run of another length, state_dict()
    raises. Calls count from the construction, or from where a state was loaded, so that a run
    resumed from such a file goes on in its rhythm. Each time it costs one all-gather of the states.
    0: never; None: never, and the first step of several ranks logs a line about it.
    """

    def __post_init__(self) -> None:
        self._check_stage()
        if isinstance(self.process_group, str) and self.process_group != "alone":
            raise ValueError(
                f"Invalid process_group: {self.process_group!r}. Give a ProcessGroup, None for the "
                'default group, or "alone".'
            )
        cap = self.bucket_cap_mb
        if cap != "auto" and (isinstance(cap, bool) or not isinstance(cap, int | float)):
            raise TypeError(f'bucket_cap_mb must be a number of MiB or "auto", got {cap!r}.')
        if cap != "auto" and not 0 < cap < float("inf"):
            raise ValueError(f"Invalid bucket_cap_mb: {cap}. Must be > 0 MiB.")
        bound = self.clip_grad_norm
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
            raise TypeError(f"clip_grad_norm must be a number or None, got {bound!r}.")
        if bound is not None and not bound > 0:
            raise ValueError(f"Invalid clip_grad_norm: {bound}. Must be > 0, or None for no clip.")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}.")
        for name in ("overlap_grad_sync", "overlap_param_sync"):
            if not (isinstance(getattr(self, name), bool) or getattr(self, name) == "auto"):
                raise TypeError(f'{name} must be a bool or "auto", got {getattr(self, name)!r}.')
        every = self.consolidate_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int)):
            raise TypeError(f"consolidate_every must be a number of steps or None, got {every!r}.")
        if every is not None and every < 0:
            raise ValueError(f"Invalid consolidate_every: {every}. Must be >= 0 steps.")
        for name, dtypes in _SYNC_DTYPES.items():
            dtype = getattr(self, name)
            if dtype is not None and dtype not in dtypes:
                names = ", ".join(map(str, dtypes))
                raise ValueError(f"Invalid {name}: {dtype}. Use one of {names}.")
        self._check_bits()
        for name, choice in (("kernel", KernelChoice), ("collectives", CollectivesChoice)):
            if getattr(self, name) not in get_args(choice):
                raise ValueError(
                    f"Invalid {name}: {getattr(self, name)!r}. Use one of {get_args(choice)}."
                )

    def _check_stage(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (1, 2):
            raise ValueError(f"Invalid stage: {self.stage}. Use 1, or 2 to shard gradients, too.")
        if self.stage == 2 and self.grads_are_reduced:
            raise ValueError(
                "Invalid stage: 2 with grads_are_reduced=True. Gradients that another wrapper "
                "reduces are not sharded here: use stage=1, or train without that wrapper."
            )

    def _check_bits(self) -> None:
        for name, choices in _SYNC_BITS.items():
            bits, dtype = getattr(self, name), name.replace("bits", "dtype")
            if bits is None:
                continue
            if isinstance(bits, bool) or bits not in choices:
                names = " or ".join(map(str, choices))
                raise ValueError(f"Invalid {name}: {bits}. Use {names}, or None.")
            if getattr(self, dtype) is not None:
                raise ValueError(f"Invalid {name}: {bits} with {dtype}. Use one of the two.")
        if self.grad_sync_bits is not None and self.mesh is not None:
            raise ValueError(
                f"Invalid grad_sync_bits: {self.grad_sync_bits} with a mesh, whose second sum "
                "needs more. Use grad_sync_dtype=torch.bfloat16."
            )
        if self.grad_sync_bits is not None and self.grads_are_reduced:
            raise ValueError(
                f"Invalid grad_sync_bits: {self.grad_sync_bits} with grads_are_reduced=True, where "
                "another wrapper sends gradients. Choose how it does so there."
            )

    @classmethod
    def of(cls, value: ShardConfig | Mapping[str, Any] | None) -> ShardConfig:
        """Return ``value`` as a ShardConfig: itself, built from a plain dict, or the defaults."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(
                f"sharding must be a ShardConfig or a dict, got {type(value).__name__}."
            )
        options = dict(value)
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"Unknown sharding options {unknown}. Known: {known}.")
        for name in _SYNC_DTYPES:
            dtype = options.get(name)
            if isinstance(dtype, str):
                options[name] = getattr(torch, dtype.removeprefix("torch."), dtype)
        return cls(**options)
