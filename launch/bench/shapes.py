"""Parameter shapes that the benchmarks run on."""

from __future__ import annotations

Shape = tuple[int, ...]


def _encoder_layer(hidden: int, inner: int) -> list[Shape]:
    attention = [(hidden, hidden), (hidden,)] * 4
    norm = [(hidden,), (hidden,)]
    return [*attention, *norm, (inner, hidden), (inner,), (hidden, inner), (hidden,), *norm]


def bert(layers: int, hidden: int, vocabulary: int = 30522) -> list[list[Shape]]:
    """Return BERT's parameter shapes by block: embeddings, each layer, pooler (no task head)."""
    embeddings = [(vocabulary, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    encoder = [_encoder_layer(hidden, 4 * hidden) for _ in range(layers)]
    return [embeddings, *encoder, [(hidden, hidden), (hidden,)]]


def equal_tensors(count: int, numel: int) -> list[list[Shape]]:
    """Return ``count`` 1-D tensors of ``numel`` elements together, in at most 12 blocks.

    Their sizes differ by one at most.
    """
    if not 0 < count <= numel:
        raise ValueError(f"Invalid count: {count}. Must be in [1, numel = {numel}].")
    small, larger = divmod(numel, count)
    shapes: list[Shape] = [(small + (i < larger),) for i in range(count)]
    per_block = -(-count // 12)
    return [shapes[start : start + per_block] for start in range(0, count, per_block)]


def named(name: str) -> list[list[Shape]]:
    """Return the blocks of shapes called ``name``.

    ``bert-base`` (109.48 M elements), ``bert-small`` (28.76 M), ``bert-tiny`` (4.39 M), or
    ``COUNTxNUMEL``: so many tensors of NUMEL elements together, such as ``1000x16777216``.
    """
    berts = {"bert-base": (12, 768), "bert-small": (4, 512), "bert-tiny": (2, 128)}
    if name in berts:
        return bert(*berts[name])
    count, separator, numel = name.partition("x")
    if not (separator and count.isdigit() and numel.isdigit()):
        raise ValueError(f"Unknown shapes {name!r}. Use one of {sorted(berts)} or COUNTxNUMEL.")
    return equal_tensors(int(count), int(numel))


def numel_of(blocks: list[list[Shape]]) -> int:
    """Return the number of elements of all tensors."""
    total = 0
    for block in blocks:
        for shape in block:
            numel = 1
            for size in shape:
                numel *= size
            total += numel
    return total
