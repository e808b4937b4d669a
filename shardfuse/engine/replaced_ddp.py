"""Warnings for scripts in which an optimizer has replaced DistributedDataParallel.

Two things that such a script had before are lost without an error: all tensors of the model were
equal on all ranks, those too that no optimizer was given; and ``p.grad`` was the mean over ranks,
which torch.nn.utils.clip_grad_norm_() could clip. Both are seen in the first steps. Ranks tell each
other of them through the store, in the first step in which they see something, and read it in the
next, so that nobody waits.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardfuse.comm import Communicator
from shardfuse.engine.intake import levels_to_caller

_NUM_SAMPLES = 64
"""Elements of a tensor that are compared."""

_MAX_TENSORS = 500
"""Tensors that are compared: the text of a rank stays below 20 KB."""

_MAX_LOOKS = 3
"""Steps in which a rank looks whether others have written to gradients, too."""


class RestOfModel:
    """Warns once if tensors of the model that the optimizer was not given differ between ranks.

    Args:
        comm: the ranks that share the optimizer.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._names: list[str] = []  # of the tensors that this rank has told of
        self._others_have_told = False

    def tell(self, roots: Sequence[nn.Module], params: Sequence[Tensor]) -> None:
        """Tell the others of the tensors of ``roots`` that are not among ``params``.

        ``params`` are the tensors that any optimizer of ours keeps equal.
        """
        own = set(map(id, params))
        rest: dict[str, Tensor] = {}
        for root in roots:
            named = [*root.named_parameters(), *root.named_buffers()]
            rest |= {name: tensor for name, tensor in named if id(tensor) not in own}
        dense = [(n, t) for n, t in rest.items() if t.layout == torch.strided and t.numel() > 0]
        dense = [(n, t) for n, t in dense if t.device.type != "meta" and not t.is_quantized]
        dense = [(n, t) for n, t in dense if not hasattr(t, "device_mesh")][:_MAX_TENSORS]
        if dense:
            self._others_have_told = False
            self._names = [name for name, _ in dense]
            codes = [zlib.crc32(_bytes(tensor)) for _, tensor in dense]
            self._comm.session.publish(
                "rest of the model", " ".join(f"{code:08x}" for code in codes)
            )

    def warn(self) -> None:
        """Compare what the ranks have told, in the second call after tell(); the first rank warns.

        After the first one the ranks communicate, so that all have told.
        """
        if not self._names or not self._others_have_told:
            self._others_have_told = True
            return
        names, self._names = self._names, []
        if self._comm.world.rank != 0:
            return
        told = [
            text.split()
            for text in self._comm.session.read("rest of the model")
            if text is not None
        ]
        if any(len(codes) != len(names) for codes in told):
            return
        differ = [n for n, *codes in zip(names, *told, strict=True) if len(set(codes)) > 1]
        if differ:
            more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
            warnings.warn(
                f"Tensors of the model differ between ranks: {', '.join(differ[:3])}{more}. They "
                "are not among the parameters that the optimizer was given. "
                "DistributedDataParallel makes all parameters equal when it is built, and buffers "
                "before each forward; nobody does now. Pass the model in place of its parameters; "
                "where you pass parameter groups, call optimizer.broadcast_buffers(model) once. "
                "If they are to differ, pass sharding={'broadcast_buffers': False}.",
                UserWarning,
                stacklevel=levels_to_caller(),
            )


class WrittenGrads:
    """Warns once, on every rank that does so, if several ranks write to p.grad after backward().

    Args:
        comm: the ranks that share the optimizer.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._num_looks = 0

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to look at."""
        return self._num_looks > _MAX_LOOKS or self._comm.world_size == 1

    def note(self, names: Sequence[str]) -> None:
        """Take note of the parameters whose gradients were written to before this step."""
        if not names:
            return
        self._num_looks += 1
        if self._num_looks == 1:
            self._comm.session.publish("written gradients", names[0])
            return
        told = self._comm.session.read("written gradients")
        ranks = [rank for rank, name in enumerate(told) if name is not None]
        if len(ranks) < 2:
            return
        self._num_looks = _MAX_LOOKS + 1
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"p.grad of {names[0]}{more} was written to between backward() and step(), on ranks "
            f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}. If this is "
            "torch.nn.utils.clip_grad_norm_() or clip_grad_value_(): they see the gradient of this "
            "rank alone, and not the mean over ranks, as they did under DistributedDataParallel. "
            "So each rank is clipped by another factor. Call optimizer.clip_grad_norm_() in their "
            "place. If each rank's own gradient is meant, as by a mask, nothing need be done.",
            UserWarning,
            stacklevel=levels_to_caller(),
        )


@torch.no_grad()
def _bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a sample of ``tensor``."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    sample = flat[:: max(1, flat.numel() // _NUM_SAMPLES)].contiguous()
    return bytes(sample.view(torch.uint8).tolist())
