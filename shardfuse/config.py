"""How the flat buffers are sharded: one frozen, validated record."""

from __future__ import annotations

import sys
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
    "broadcast_params",
    "broadcast_buffers",
    "report_overflow",
    "debug_sync",
    "error_feedback",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig:
    """All options of sharding, its communication and its kernels.

    Wherever a ``ShardConfig`` is accepted, a plain dict with the same keys is accepted too, so that
    options fit in a JSON file. Dtypes may then be strings (``"float32"``).

    Raises:
        TypeError: an unknown key, or a value of the wrong type.
        ValueError: a value out of range.
    """

    stage: int = 1
    """ZeRO stage. 1: moments and fp32 masters are sharded, gradients live in a full flat buffer.

    2: gradients are sharded too. In every backward outside no_sync(), each gradient is summed over
    ranks as soon as autograd has made it. This rank keeps its shard of the sum in fp32, and
    ``p.grad`` is None. step() clears the sums, as zero_grad() would. All ranks must run the same
    number of backwards, and clear gradients at the same place. Where one backward reaches params of
    two such optimizers, they must use the same layers, too. Buckets in flight take memory, so keep
    bucket_cap_mb at 1/32 of the gradients or less. A single rank keeps all gradients. Torch's Join
    (uneven inputs) needs stage 1.
    """

    process_group: Any = None
    """Ranks to shard over. None: the default group, or this process by itself if there is no group
    and no launcher has started several processes. "alone": this process by itself in any case. An
    object with the methods of ``shardfuse.comm.Communicator`` is used as it is."""

    mesh: Any = None
    """A torch DeviceMesh of two dimensions, (replicate, shard), for hybrid sharding (HSDP).

    States and masters are sharded over the second dimension only. Gradients are summed over both:
    first within a row of ranks, then each shard over the ranks that hold its copies.
    ``process_group`` must then be the group of all ranks of the mesh. None: all ranks shard.
    """

    bucket_cap_mb: float | Literal["auto"] = "auto"
    """Upper bound of one collective's payload in MiB. auto, on the CPU: 8 with gloo over sockets
    and no mesh, where buckets overlap backward and forward and small ones start sooner (4 to 25
    took the same time within the noise of two hosts at 1 Gbit/s); else 25, the fastest measured on
    one host. On accelerators: 50 with overlap, 256 without, and at least a 32nd of the parameters
    (not run on hardware). At least 1 per rank on the CPU and 0.5 elsewhere: messages between two
    ranks then have 512 KiB or more, or 256 KiB.

    A single rank sends nothing and has one bucket (AdamP, which keeps products of a bucket, more).
    """

    grad_sync_dtype: torch.dtype | None = None
    """Dtype in which gradients are sent: fp32, bf16 or fp16. They are then summed in fp32, those of
    bf16 and fp16 on arrival: an accelerator receives all ranks' parts of a bucket.

    None: the parameter's own dtype. gloo's ranks sum it in fp32, too. NCCL, HCCL and
    ``collectives="native"`` sum it in transit, which for bf16 and fp16 may be in that dtype, as
    under DistributedDataParallel and FSDP2. That is the default there because a sum on arrival
    needs an all-to-all, which is slow between hosts. Set bf16 for bf16 parameters on one host, and
    fp32 on many: see "Sums of bf16 gradients" in shardfuse/optim/README.md.
    """

    param_sync_dtype: torch.dtype | None = None
    """Dtype in which updated fp32 parameters are sent: bf16 or fp16. None: their own.

    An all-gather then has half the bytes. Every step rounds the parameters to that dtype on all
    ranks, also those without a gradient. Masters in fp32 are sharded and part of the state. This
    takes 2 + 4 / W more bytes per element. Parameters of lower precision are sent as they are. A
    single rank rounds nothing.
    """

    grad_sync_bits: int | None = None
    """8: gradients are sent in 8 bits per element and one scale per block of 512, instead of
    ``grad_sync_dtype``. None: they are not.

    Each rank sums in fp32 on arrival, with its own part unrounded. The error of an element is at
    most 1/254 of the largest magnitude in its block. Tensors then start at whole blocks, and an
    overflow makes its whole block non-finite.
    """

    param_sync_bits: int | None = None
    """8 or 4: updated fp32 parameters are sent as differences to the values that all ranks have, in
    that many bits per element and one scale per block of 512, instead of ``param_sync_dtype``.
    None: they are not.

    The rounding error is added to the next difference. It is sharded (4 / W bytes per element) and
    part of the state, as "param_error". Ranks must have equal parameters, because only differences
    are sent: each step compares checksums of all parameters. Load or edit parameters in the same
    way on all ranks. Parameters of lower precision are sent as they are. A single rank rounds
    nothing.

    Ranks that differ raise an error: on the CPU in that step, on an accelerator in the next one or
    later, because the host does not wait for the answer.
    """

    error_feedback: bool = True
    """Whether the rounding error of ``param_sync_bits`` is added to the next difference."""

    overlap_grad_sync: bool | Literal["auto"] = "auto"
    """Send buckets of gradients during backward, as soon as they are complete.

    A gradient that changes afterwards is sent again, so steps are the same bit for bit. Run all
    backwards of a step except the last inside no_sync(). On accelerators the host looks at no
    values: a write by ``p.grad.data``, or by the kernel of an extension, is not seen. A gradient
    scaler must be ShardedGradScaler, or torch's; after unscale_() of torch's, gradients are sent in
    step().

    auto: with gloo over sockets, NCCL and HCCL, where bytes move while a rank computes; not over a
    mesh. NCCL and HCCL, whose messages have an order, get a process group for each optimizer, so
    the model may communicate in its own at any time. (Not run on hardware.) Received parts of all
    buckets stay in memory: with gloo (W - 1) / W of the gradients' bytes, else 1 / W, or all of
    them with ``grad_sync_dtype`` of 16 bits or ``grad_sync_bits``. A group of HCCL takes twice
    HCCL_BUFFSIZE (2 x 200 MB) more.
    """

    overlap_param_sync: bool | Literal["auto"] = "auto"
    """Let step() return while updated parameters are in flight; reading one waits for it.

    [Note: in flight] in engine/gather.py lists the reads. auto: as for ``overlap_grad_sync``.
    """

    debug_sync: bool = False
    """Wait for every collective where it is launched, to see whether overlap is at fault."""

    grads_are_reduced: bool | Literal["auto"] = "auto"
    """Whether ``p.grad`` is already the mean over ranks, as under DistributedDataParallel.

    auto: it is if a DistributedDataParallel of this process holds the parameters, at construction
    or when autograd makes the first gradient. Set it for another wrapper that averages.
    """

    clip_grad_norm: float | None = None
    """Upper bound of the mean gradient's L2 norm in every step(), as by clip_grad_norm() before it.
    Use it if a training loop only calls step(). Costs one all-reduce of a float."""

    broadcast_params: bool = True
    """Copy the first rank's parameter values to all ranks at construction, and the buffers of a
    model that was passed in place of parameters."""

    broadcast_buffers: bool = True
    """Copy the first rank's buffers to all ranks in every step(), in one message.

    Of a model that was passed in place of parameters, or to ``broadcast_buffers()``. Under
    DistributedDataParallel its own option of this name counts. Buffers of other models are not
    changed, and a warning names those that differ between ranks.
    """

    collectives: CollectivesChoice = "auto"
    """native: the backend's own. pairwise: with gloo on the CPU, where that is faster, ranks send
    in pairs. auto: as pairwise, and ranks on one host read each other's memory."""

    kernel: KernelChoice = "auto"
    """eager: cache-sized tiles. compile: torch.compile. auto: chooses between these and torch's
    fused operators, and logs the reason."""

    report_overflow: bool = False
    """Log which parameter, on which rank, made a gradient scaler skip a step, and keep it as
    ``last_overflow``. Costs nothing in other steps. Reduced gradients overflow on all ranks."""

    consolidate_every: int | None = None
    """Every this many calls of step(), bring the full state to the first rank's CPU memory.

    ``if rank == 0: torch.save(optimizer.state_dict())`` then works, without a call on the other
    ranks, until the next step. After any other step state_dict() raises. Calls are counted from the
    construction, or from the step of a loaded state, so a resumed run keeps the rhythm. Each time
    costs one all-gather of the states. 0: never. None: never, and with several ranks the first
    step logs a line about it.
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
        is_bound = bound is None or (0 < bound <= sys.float_info.max or bound == float("inf"))
        if not is_bound:
            raise ValueError(f"Invalid clip_grad_norm: {bound}. Must be > 0, or None for no clip.")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}.")
        for name in ("overlap_grad_sync", "overlap_param_sync", "grads_are_reduced"):
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
                raise ValueError(f"Invalid {name}: {dtype!r}. Use one of {names}.")
        self._check_bits()
        for name, choice in (("kernel", KernelChoice), ("collectives", CollectivesChoice)):
            if getattr(self, name) not in get_args(choice):
                raise ValueError(
                    f"Invalid {name}: {getattr(self, name)!r}. Use one of {get_args(choice)}."
                )

    def _check_stage(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in (1, 2):
            raise ValueError(f"Invalid stage: {self.stage!r}. Use 1, or 2 to shard gradients too.")
        if self.stage == 2 and self.grads_are_reduced is True:
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
                raise ValueError(f"Invalid {name}: {bits!r}. Use {names}, or None.")
            if getattr(self, dtype) is not None:
                raise ValueError(f"Invalid {name}: {bits} with {dtype}. Use one of the two.")
        if self.grad_sync_bits is not None and self.mesh is not None:
            raise ValueError(
                f"Invalid grad_sync_bits: {self.grad_sync_bits} with a mesh, whose second sum "
                "needs more bits. Use grad_sync_dtype=torch.bfloat16."
            )
        if self.grad_sync_bits is not None and self.grads_are_reduced is True:
            raise ValueError(
                f"Invalid grad_sync_bits: {self.grad_sync_bits} with grads_are_reduced=True, where "
                "another wrapper sends gradients. Set its own option, if it has one."
            )

    @classmethod
    def of(cls, value: ShardConfig | Mapping[str, Any] | None) -> ShardConfig:
        """Return ``value`` as a ShardConfig: itself, built from a plain dict, or the defaults.

        Args:
            value: a ShardConfig, a dict with its keys, or None for the defaults.

        Raises:
            TypeError: an unknown key, or a value of the wrong type.
            ValueError: a value out of range.
        """
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
