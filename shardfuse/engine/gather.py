"""Updated parameters back to all ranks, one collective per bucket."""

from __future__ import annotations

from torch.profiler import record_function

from shardfuse.buffers import FlatBuffer
from shardfuse.comm import Communicator, Handle
from shardfuse.layout import Bucket


class ParamSync:
    """All-gathers updated shards into the flat parameter buffers, one collective per bucket."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._handles: list[Handle] = []

    def start(self, buffer: FlatBuffer, bucket: Bucket) -> None:
        """Launch the all-gather of ``bucket``; its shard must not be written until finish()."""
        with record_function(f"shardfuse::all_gather b{bucket.index}"):
            handle = self._comm.all_gather(
                buffer.bucket(bucket), buffer.shard(bucket, self._comm.rank)
            )
        self._handles.append(handle)

    def broadcast(self, buffer: FlatBuffer) -> None:
        """Launch broadcasts of the first rank's values of the whole buffer, bucket by bucket."""
        for bucket in buffer.flat.buckets:
            self._handles.append(self._comm.broadcast(buffer.bucket(bucket)))

    def finish(self) -> None:
        """Wait for everything launched; after this the parameters may be read."""
        with record_function("shardfuse::wait_all_gather"):
            for handle in self._handles:
                handle.wait()
        self._handles.clear()
