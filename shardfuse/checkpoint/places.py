"""Which ranks' indices a rank needs that loads, known from the manifest alone.

[Note: few indices] Every rank's index says where its fragments lie; that of thousands of ranks is
gigabytes. Which rank has which elements follows from the integers that shards were cut by, which
the manifest has. So a rank that loads reads the indices of those that overlap its own fragments,
and its share of all others, so that every byte is looked at by some rank. If these do not have all
that it needs, because a copy has written it or a module is loaded without its optimizer, it reads
all indices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardfuse.checkpoint.errors import DamagedCheckpoint
from shardfuse.engine.sharded_state import Parts


def ranks_with(
    geometry: Sequence[Mapping[str, Any]],
    ranges: Iterable[tuple[str, int, int]],
    saved_by: int = 1 << 32,
) -> set[int]:
    """Return which ranks have written a part of ``ranges``.

    Args:
        geometry: Parts.geometry() of those who have saved.
        ranges: Parts.ranges() of who loads.
        saved_by: number of ranks that have saved.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError: ``geometry`` is not that.
    """
    flats = {name: flat for flat in geometry for name in flat["slots"]}
    found: set[int] = set()
    for name, start, numel in ranges:
        if name not in flats:
            continue
        buckets = flats[name]["buckets"]
        at = flats[name]["slots"][name] + start
        end = at + numel
        index = bisect_right(buckets, at, key=lambda bucket: bucket[0]) - 1
        while at < end:
            first, shard_numel, num_ranks = buckets[index]
            stop = min(end, first + shard_numel * num_ranks)
            if not first <= at < stop:
                raise ValueError(f"bucket {index} does not hold element {at:,}")
            last = (stop - 1 - first) // shard_numel
            if last >= saved_by:
                raise ValueError(f"bucket {index} is of {last + 1:,} ranks, of {saved_by:,}")
            found |= set(range((at - first) // shard_numel, last + 1))
            at, index = stop, index + 1
    return found


def ranks_needed(
    layouts: Mapping[str, Any], saved_by: int, parts: Mapping[str, Parts], rank: int
) -> set[int]:
    """Return whose indices one rank reads; the first one's has all that is whole."""
    world_size = max((each.comm.world_size for each in parts.values()), default=1)
    found = {0, *range(rank, saved_by, world_size)}
    try:
        for key, each in parts.items():
            found |= ranks_with(layouts.get(key, ()), each.ranges(), saved_by)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise DamagedCheckpoint(
            [f"its layouts are not as shardfuse writes them: {error}"]
        ) from None
    return found
