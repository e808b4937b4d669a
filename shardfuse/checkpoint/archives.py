"""Archives of small tensors, as torch.save() writes them and torch.load() reads them.

[Note: small archives] In the format of torch.distributed.checkpoint, each fragment is an archive of
torch.save(): a zip file of several records, for which torch takes 0.1 ms to write and 0.2 ms to
read, however few values it holds. Archives of one dtype and shape differ in the values and their
checksum alone. So torch writes one of each; the others are that one with other values.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import re
import struct
import zipfile
import zlib
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

SMALL_NBYTES = 16 << 10
"""Tensors up to this size are written and read without torch.save() and torch.load()."""

_MIN_REQUESTS = 8
"""A template is made for so many tensors of a dtype and shape: it takes as long as some of them."""


class _Template(NamedTuple):
    """An archive, with the offsets (bytes) of the fields that differ between tensors."""

    archive: bytes
    start: int  # of the values
    stop: int
    checksums: tuple[int, ...]  # of the values


def write_small(tensor: Tensor) -> bytes | None:
    """Return the archive of a CPU tensor; None if torch.save() must write it."""
    is_small = 0 < tensor.nbytes <= SMALL_NBYTES and tensor.is_contiguous()
    is_small = is_small and not (tensor.is_conj() or tensor.is_neg())  # bytes of other values
    template = _lazy_template(tensor.dtype, tuple(tensor.shape)).template() if is_small else None
    return None if template is None else _filled(template, _bytes_of(tensor))


def read_small(archive: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
    """Return the tensor of a contiguous ``shape``; None if torch.load() must read the archive."""
    is_small = 0 < math.prod(shape) * dtype.itemsize <= SMALL_NBYTES
    template = _lazy_template(dtype, shape).template() if is_small else None
    if template is None or len(archive) != len(template.archive):
        return None
    values = archive[template.start : template.stop]
    head = _filled(template, values)[: template.start]
    if archive[: template.start] != head:  # another version of torch wrote it, or it is damaged
        return None
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)


class _LazyTemplate:
    """The template of a dtype and shape, of SMALL_NBYTES at most, made once it is worth while."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape
        self._num_requests = 0
        self._template: _Template | None = None

    def template(self) -> _Template | None:
        """Return the template; None where torch is faster, or writes archives in another way."""
        self._num_requests += 1
        if self._num_requests == _MIN_REQUESTS:
            self._template = self._make()
        return self._template

    def _make(self) -> _Template | None:
        nbytes = math.prod(self._shape) * self._dtype.itemsize
        values, others = os.urandom(nbytes), os.urandom(nbytes)
        tensor = torch.frombuffer(bytearray(values), dtype=self._dtype).view(self._shape)
        stream = io.BytesIO()
        torch.save(tensor, stream)
        archive = stream.getvalue()
        with zipfile.ZipFile(stream) as file:
            record = next(info for info in file.infolist() if info.filename.endswith("/data/0"))
        lengths = struct.unpack_from("<HH", archive, record.header_offset + 26)
        start = record.header_offset + 30 + sum(lengths)
        checksum = re.escape(struct.pack("<I", zlib.crc32(values)))
        places = tuple(found.start() for found in re.finditer(checksum, archive, re.DOTALL))
        template = _Template(archive, start, start + nbytes, places)
        return template if _reads_back(_filled(template, others), others) else None


_lazy_template = lru_cache(1024)(_LazyTemplate)


def _bytes_of(tensor: Tensor) -> bytes:
    # Not by numpy(), because torch runs without NumPy, too.
    flat = tensor.contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes)


def _filled(template: _Template, values: bytes) -> bytes:
    data = bytearray(template.archive)
    data[template.start : template.stop] = values
    for place in template.checksums:
        struct.pack_into("<I", data, place, zlib.crc32(values))
    return bytes(data)


def _reads_back(archive: bytes, values: bytes) -> bool:
    """Return whether torch reads these values, and all checksums are right."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        is_whole = file.testzip() is None
    found = torch.load(io.BytesIO(archive), weights_only=True)
    return is_whole and _bytes_of(found) == values
