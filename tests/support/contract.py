"""A process group that is registered as "hccl", carries data over gloo, and refuses what HCCL does.

    register()                     then dist.init_process_group("hccl") makes contract groups
    pytest --backend hccl          the suite on it; hccl-zero-copy: also changes inputs

What it refuses, in words like torch_npu's: fp64 and uint64 in what reduces, operations other than
SUM, PROD, MIN and MAX, sizes that are no multiple, tensors that are not dense, contiguous and on
its device, storage offsets that are no multiple of 512 bytes, an all-gather whose input lies in its
output, coalescing, receiving from any source, and more communicators than there is memory for.
Dtypes, counts and operations that differ between ranks are an error on all of them.

Stricter than torch_npu where that is portable: AVG, which it makes of SUM and a division in the
tensor's dtype; PREMUL_SUM, which it makes by multiplying the caller's input in place; offsets,
which are slow only; and the all-gather in place, which its documents can be read as forbidding. The
last two do not hold for DeepSpeed's own calls.

Sums are in the order of ranks and in the tensor's dtype, as with HCCL_DETERMINISTIC=strict. Work is
done on a thread, in the order of launches (contract_stream.py); wait() blocks where tensors are on
the CPU, and else has the current stream wait (contract_device.py). Tags of messages mean nothing,
as in HCCL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.contract_stream import ContractWork, Stream, header, read_header, streams
from tests.support.contract_terms import (
    ContractError,
    Terms,
    is_theirs,
    misaligned_parts,
    overlap,
    reduction,
    refuse,
    uneven,
)

VARIABLE = "SHARDFUSE_TEST_BACKEND"
"""What `pytest --backend` hands to the ranks."""

ZERO_COPY_VARIABLE = "TORCH_HCCL_ZERO_COPY"
"""The user's, by which reduce-scatter and all-reduce may modify their input (A3)."""

_HEADERS, _PAYLOADS = 1, 2  # gloo's tags of the two messages of a send


class Collectives:
    """What c10d calls, under its names, for a group of ``rank()`` and ``size()``."""

    terms: Terms
    _stream: Stream
    rank: Callable[[], int]
    size: Callable[[], int]
    _launch: Callable[..., ContractWork]

    def allreduce(self, tensors: Any, opts: Any = None) -> ContractWork:
        (tensor,) = _only("all_reduce", tensors)
        refuse("all_reduce", self.terms, tensor)
        opts = opts or dist.AllreduceOptions()
        name, function = reduction("all_reduce", opts.reduceOp, tensor)

        def body() -> None:
            parts = self._gathered(tensor)
            tensor.copy_(fold(function, parts).to(tensor.dtype))

        return self._launch(_named("all_reduce", tensor, f"by {name}"), body, [tensor])

    def broadcast(self, tensors: Any, opts: Any = None) -> ContractWork:
        (tensor,) = _only("broadcast", tensors)
        refuse("broadcast", self.terms, tensor)
        root = 0 if opts is None else opts.rootRank

        def body() -> None:
            data = _bytes(tensor)
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._stream.gloo.broadcast([data], options).wait()
            if self.rank() != root:
                _bytes_into(data, tensor)

        return self._launch(_named("broadcast", tensor, f"from {root}"), body, [tensor])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ContractWork:
        refuse("all_gather", self.terms, output, input)
        uneven("all_gather", output, input, self.size())
        misaligned_parts("all_gather", self.terms, input.nbytes)
        if overlap(output, input) and not is_theirs():
            raise ContractError(
                "HCCL all_gather: sendBuf and recvBuf overlap; their addresses must differ."
            )

        def body() -> None:
            output.view(-1).copy_(torch.cat([part.view(-1) for part in self._gathered(input)]))

        return self._launch(_named("all_gather", output), body, [output])

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> ContractWork:
        refuse("reduce_scatter", self.terms, output, input)
        uneven("reduce_scatter", input, output, self.size())
        misaligned_parts("reduce_scatter", self.terms, output.nbytes)
        opts = opts or dist.ReduceScatterOptions()
        name, function = reduction("reduce_scatter", opts.reduceOp, input)

        def body() -> None:
            parts = [part.view(input.dtype) for part in self._exchanged(_bytes(input))]
            if self.terms.modifies_input:
                input.fill_(13 + self.rank())
            output.view(-1).copy_(fold(function, parts))

        return self._launch(_named("reduce_scatter", input, f"by {name}"), body, [output])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> ContractWork:
        """Of sizes that are given: HcclAlltoAllV, which torch_npu calls then."""
        refuse("all_to_all", self.terms, output, input)
        if not output_splits and not input_splits:
            uneven("all_to_all", output, input, 1)
            uneven("all_to_all", input, input[: input.numel() // self.size()], self.size())
            misaligned_parts("all_to_all", self.terms, input.nbytes // self.size())
        sizes = [
            _split_nbytes(tensor, splits, self.size())
            for tensor, splits in ((output, output_splits), (input, input_splits))
        ]

        def body() -> None:
            received = torch.empty(output.nbytes, dtype=torch.uint8)
            self._stream.gloo.alltoall_base(received, _bytes(input), *sizes).wait()
            _bytes_into(received, output)

        # Sizes that are given may differ between ranks.
        alike = input[:0] if output_splits or input_splits else input
        return self._launch(_named("all_to_all", alike), body, [output])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> ContractWork:
        """The form of lists, for which torch_npu pads tensors by itself."""
        (output,), (input,) = _only("all_gather", outputs), _only("all_gather", inputs)
        refuse("all_gather", self.terms, input)
        for part in output:
            uneven("all_gather", part, input, 1)

        def body() -> None:
            for part, data in zip(output, self._gathered(input), strict=True):
                part.copy_(data.view_as(part))

        return self._launch(_named("all_gather of lists", input), body, output)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> ContractWork:
        """An all-gather, of which others than the root leave nothing, as in torch_npu."""
        (input,) = _only("gather", inputs)
        refuse("gather", self.terms, input)

        def body() -> None:
            parts = self._gathered(input)
            for part, data in zip(outputs[0] if outputs else [], parts, strict=False):
                part.copy_(data.view_as(part))

        return self._launch(_named("gather", input, f"to {opts.rootRank}"), body)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> ContractWork:
        (output,) = _only("scatter", outputs)
        refuse("scatter", self.terms, output)

        def body() -> None:
            whole = torch.cat([part.reshape(-1) for part in inputs[0]]) if inputs else None
            data = _bytes(output).repeat(self.size()) if whole is None else _bytes(whole)
            options = dist.BroadcastOptions()
            options.rootRank = opts.rootRank
            self._stream.gloo.broadcast([data], options).wait()
            _bytes_into(data.chunk(self.size())[self.rank()], output)

        return self._launch(_named("scatter", output, f"from {opts.rootRank}"), body, [output])

    def barrier(self, opts: Any = None) -> ContractWork:
        """An all-reduce, as in torch_npu."""
        work = self.allreduce([torch.ones(1, device=self.terms.devices[0])])
        work.times.blocks_host = True
        return work

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, on the CPU, in order."""
        mine = _bytes(tensor)
        parts = mine.new_empty(self.size() * mine.numel())
        self._stream.gloo._allgather_base(parts, mine).wait()
        return [part.view(tensor.dtype).view_as(tensor) for part in parts.chunk(self.size())]

    def _exchanged(self, data: Tensor) -> list[Tensor]:
        """Return what every rank has for this one."""
        parts = torch.empty_like(data)
        self._stream.gloo.alltoall_base(parts, data, [], []).wait()
        return list(parts.chunk(self.size()))


def _split_nbytes(tensor: Tensor, splits: Any, world_size: int) -> list[int]:
    """Return the bytes of each rank's part of ``tensor``; raise where parts are not all of it."""
    numels = list(splits or [tensor.numel() // world_size] * world_size)
    if len(numels) != world_size or sum(numels) != tensor.numel():
        raise ContractError(
            f"HCCL all_to_all: {tensor.numel()} elements in {numels} for {world_size} ranks."
        )
    return [numel * tensor.element_size() for numel in numels]


class ContractGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]
    """A group of ranks that keeps to HCCL's terms.

    Args:
        options: what c10d hands to a backend's creator.
        terms: of the machine.
    """

    def __init__(self, options: Any, terms: Terms) -> None:
        dist.ProcessGroup.__init__(self, options.group_rank, options.group_size)
        self.terms = terms
        gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        self._stream = Stream(gloo, options.timeout, terms.devices[0])
        self._name = str(options.group_id)
        ranks = options.global_ranks_in_group
        self._me = ranks[options.group_rank] if ranks else options.group_rank
        self._is_open = False

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self.terms.devices]

    def _get_backend(self, device: Any) -> Any:
        return self

    def getBackendName(self) -> str:
        return "hccl"

    supports_splitting = False  # so torch 2.13 connects no rank before the first collective

    def _launch(
        self, name: str, body: Callable[[], None], result: Sequence[Tensor] = ()
    ) -> ContractWork:
        if not self._is_open:
            self._open()
        return self._stream.launch(name, body, result)

    def _open(self) -> None:
        """Take memory for a communicator, as HCCL does at the first collective."""
        taken = _open_streams.setdefault(self._me, set())
        if len(taken) >= self.terms.max_communicators:
            raise ContractError(
                f"HCCL communicator {len(taken) + 1}: out of memory. Each takes 2 x "
                f"HCCL_BUFFSIZE; {self.terms.memory_mb} MB are enough for "
                f"{self.terms.max_communicators}. Use fewer process groups."
            )
        self._is_open = True
        taken.add(self._stream)

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        refuse("send", self.terms, tensor)
        self._stream.check()
        work = _Sending(self._stream, tensor, rank)
        self._stream.sent.append(work)  # gloo breaks a connection where one is dropped under way
        return work

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        refuse("recv", self.terms, tensor)
        self._stream.check()
        return _Receiving(self._stream, tensor, rank)

    def abort(self) -> None:
        """Do nothing, as c10d's Backend, whose method it is in torch_npu, too."""

    def abort_hccl_comm(self, reason: str) -> None:
        """End what is under way; nothing can be launched any more."""
        self._stream.abort(reason)

    def shutdown(self) -> None:
        _open_streams.get(self._me, set()).discard(self._stream)
        self._stream.close()


_open_streams: dict[int, set[Stream]] = {}  # by rank: ranks may be threads


class _Sending(ContractWork):
    """A message on its way, after one that says what it is."""

    def __init__(self, stream: Stream, tensor: Tensor, rank: int) -> None:
        super().__init__(stream)
        messages = [(header(_named("message", tensor)), _HEADERS), (_bytes(tensor), _PAYLOADS)]
        self._works = [stream.gloo.send([data], rank, tag) for data, tag in messages]

    def wait(self, timeout: Any = None) -> bool:
        # Not for the second, which is let in where this rank's peer waits: it may send, too.
        self._works[0].wait(timeout or self._stream.timeout)
        return True


class _Receiving(ContractWork):
    """A message on its way; its size and dtype are looked at before it is let in."""

    def __init__(self, stream: Stream, tensor: Tensor, rank: int) -> None:
        super().__init__(stream)
        self._tensor, self._rank = tensor, rank
        self._head = header("")
        self._coming = stream.gloo.recv([self._head], rank, _HEADERS)

    def wait(self, timeout: Any = None) -> bool:
        if self.is_completed():
            return super().wait(timeout)
        self._coming.wait(timeout or self._stream.timeout)
        expected, text = _named("message", self._tensor), read_header(self._head)
        if text != expected:
            self.finish(ContractError(f"EI0005: expected {expected}, rank {self._rank} has {text}"))
        else:
            data = torch.empty_like(_bytes(self._tensor))
            self._stream.gloo.recv([data], self._rank, _PAYLOADS).wait(self._stream.timeout)
            _bytes_into(data, self._tensor)
            self.finish(None, [self._tensor])
        return super().wait(timeout)


def _refused(name: str, text: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise ContractError(text)

    call.__name__ = name
    return call


_COALESCING = "Failed to find function HcclGroupStart: coalescing needs CANN 9.0."
for _name in ("allreduce", "allgather", "reduce_scatter_single", "all_gather_single"):
    setattr(ContractGroup, f"{_name}_coalesced", _refused(_name, _COALESCING))
for _name in ("_start_coalescing", "_end_coalescing", "allgather_into_tensor_coalesced"):
    setattr(ContractGroup, _name, _refused(_name, _COALESCING))
ContractGroup.reduce_scatter_tensor_coalesced = _refused("coalesced", _COALESCING)
ContractGroup.recv_anysource = _refused("recv", "HCCL recv: receiving from any source is not had.")
# Before torch 2.13.
ContractGroup._allgather_base = Collectives.all_gather_single
ContractGroup._reduce_scatter_base = Collectives.reduce_scatter_single
ContractGroup.alltoall_base = Collectives.all_to_all_single


def _only(what: str, tensors: Any) -> Any:
    if len(tensors) != 1:
        raise ContractError(f"HCCL {what}: Expecting one tensor only but got multiple.")
    return tensors


def _named(kind: str, tensor: Tensor, detail: str = "") -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of {tensor.numel()} {dtype} {detail}".rstrip()


def _bytes(tensor: Tensor) -> Tensor:
    """Return a copy of the bytes of ``tensor``, on the CPU."""
    return tensor.detach().reshape(-1).to("cpu", copy=True).view(torch.uint8)


def _bytes_into(data: Tensor, tensor: Tensor) -> None:
    tensor.view(-1).copy_(data.view(tensor.dtype))


def chosen() -> str:
    """Return what `pytest --backend` chose."""
    return os.environ.get(VARIABLE, "gloo")


def ready(choice: str | None = None) -> str:
    """Return the backend of a choice, registered, for init_process_group()."""
    choice = choice or chosen()
    if choice == "hccl-zero-copy":
        os.environ[ZERO_COPY_VARIABLE] = "1"
    elif choice == "hccl":  # of a test that names it, whatever the others have
        os.environ.pop(ZERO_COPY_VARIABLE, None)
    if choice != "gloo":
        register()
    return choice.partition("-")[0]


def register(terms: Terms | None = None) -> None:
    """Have dist.init_process_group("hccl") make contract groups; again: on other terms."""
    _consistency[0] = terms or Terms(modifies_input=os.environ.get(ZERO_COPY_VARIABLE, "0") != "0")
    if "HCCL" not in dist.Backend._plugins:
        defaults = dict(dist.Backend.default_device_backend_map)
        devices = list(_consistency[0].devices)
        dist.Backend.register_backend("hccl", _create, extended_api=True, devices=devices)
        if chosen() == "gloo":  # and other tests of this process rely on that
            dist.Backend.default_device_backend_map.update(defaults)


def close_all() -> None:
    """End all groups of this process, whose ranks were threads that have ended."""
    for stream in list(streams):
        stream.close()
    _open_streams.clear()


_consistency = [Terms()]


def _create(options: Any, backend_options: Any) -> ContractGroup:
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # torch 2.15's recorder fails at our group
    return ContractGroup(options, _consistency[0])
