"""Whose a gradient is: who else holds it or its memory, and whether it was written since.

A gradient lies in a slot of a flat buffer, which the next backward writes again. torch's own lie in
memory of their own, and callers may keep one, swap two, or hand one to another parameter. So a
slot is written only where nobody else holds what is in it; otherwise that is moved out first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def _count_references(tensors: Sequence[Tensor], position: int) -> int:
    # Python's count lacks, in older torch, a p.grad.
    return sys.getrefcount(tensors[position]) + int(
        tensors[position]._use_count()  # type: ignore[attr-defined]
    )


_NOT_HELD = _count_references([torch.empty(0)], 0)


def is_held(tensors: Sequence[Tensor], position: int) -> bool:
    """Return whether anything but the list refers to one of its tensors."""
    return _count_references(tensors, position) > _NOT_HELD


def _count_references_of_grad(param: Tensor) -> int:
    return sys.getrefcount(param.grad) + int(param.grad._use_count())  # type: ignore[union-attr]


def _count_storage_references(param: Tensor) -> int:
    assert param.grad is not None
    count = getattr(torch._C, "_storage_Use_Count", None)
    return sys.maxsize if count is None else int(count(param.grad.untyped_storage()._cdata))


def _counts_where_unseen() -> tuple[int, int]:
    """Return both counts, of a gradient that its parameter and one variable refer to."""
    param = torch.empty(1, requires_grad=True)
    param.grad = torch.empty(1)
    grad = param.grad
    counts = _count_references_of_grad(param), _count_storage_references(param)
    del grad
    return counts


_UNSEEN, _UNSEEN_STORAGE = _counts_where_unseen()


def is_unseen(param: Tensor) -> bool:
    """Return whether nobody else has ``param.grad``, which a variable refers to, or its memory."""
    if _count_references_of_grad(param) > _UNSEEN:
        return False
    return _count_storage_references(param) <= _UNSEEN_STORAGE


def move_out(grad: Tensor) -> None:
    """Give a view of a slot that is to be overwritten memory of its own, with its values.

    torch gives every gradient its own, so callers may keep one past zero_grad(), or hand it to
    another parameter.
    """
    grad.data = grad.detach().clone()


def checksum(words: Tensor) -> Tensor:
    """Return the sum () of the bits of whole words, eight bytes a number, at the speed of memory.

    Raises:
        RuntimeError: the elements of ``words`` are not dense, or make no whole words.
    """
    return words.view(-1).view(torch.int64).sum()


def _checksums(grads: Iterable[Tensor | None]) -> list[int]:
    """Return sums of the bits of all CPU memory that ``grads`` lie in.

    Of a flat buffer that is one: a call for each of thousands takes longer than their sum.
    """
    storages = {}
    for grad in grads:
        if grad is None or not grad.numel():
            continue
        if grad.device.type == "cpu" and grad.layout == torch.strided:
            storage = grad.untyped_storage()
            storages[storage.data_ptr()] = grad, storage
    sums = []
    for grad, storage in storages.values():
        if grad.nbytes == storage.nbytes() and grad.nbytes % 8 == 0 and grad.is_contiguous():
            sums.append(checksum(grad.detach()))
            continue
        every = torch.empty(0, dtype=torch.uint8).set_(storage)
        end = every.numel() // 8 * 8
        sums += [checksum(every[:end]), every[end:].sum()]
    return torch.stack(sums).tolist() if sums else []


class GradVersions:
    """Which tensors the gradients are, and what was in them: equal if unchanged.

    Views of one buffer count together: writing one counts as writing all. Scalers and writes by
    ``grad.data`` leave the version as it is, so on the CPU checksums are compared. On a device the
    host would have to wait: there scalers say what they do, and ``grad.data`` is not looked at.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._grads = [param.grad for param in params]
        self._versions = [-1 if grad is None else grad._version for grad in self._grads]
        self._checksums = _checksums(self._grads)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, GradVersions)
            and self._versions == other._versions
            and self._checksums == other._checksums
            and all(mine is theirs for mine, theirs in zip(self._grads, other._grads, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]
