"""Names and shapes of a model's parameters without memory, and values if needed."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

NamedShape = tuple[str, tuple[int, ...]]


class _Bert(NamedTuple):
    num_layers: int
    hidden: int


BERT = {
    "bert-tiny": _Bert(2, 128),
    "bert-mini": _Bert(4, 256),
    "bert-small": _Bert(4, 512),
    "bert-medium": _Bert(8, 512),
    "bert-base": _Bert(12, 768),
    "bert-large": _Bert(24, 1024),
}
"""Google's sizes (github.com/google-research/bert): uncased vocabulary of 30,522, 512 positions."""

_VOCABULARY, _POSITIONS = 30522, 512


def shapes_of(model: str) -> list[NamedShape]:
    """Return (name, shape) of each parameter in the order of registration.

    Args:
        model: a name of BERT; a number of parameters, such as "10b" or "350m", as layers of one
            shape; or "package.module:callable", which is called without arguments on torch's meta
            device and returns a module.

    Raises:
        ValueError: there is no such model, or it has no parameters.
    """
    if model in BERT:
        return list(_bert(BERT[model]))
    numel = _parse_count(model)
    if numel is not None:
        return list(_layers(numel))
    with torch.device("meta"):
        return shapes_of_module(_build(model))


def params_of(model: str, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return (name, CPU parameter) of each trained parameter, in the order of registration.

    Args:
        model: as in shapes_of(). A callable's parameters have the values that it returns. Others
            are drawn as BERT's first weights: N(0, 0.02) in matrices, ones in weights of
            LayerNorms, zeros in biases; fp32, all in memory.
        seed: seed of the random values.

    Raises:
        ValueError: as in shapes_of(), weights on the meta device, or more than this host's memory.
    """
    if ":" not in model:
        shapes = shapes_of(model)
        _check_host_memory(model, shapes)
        generator = torch.Generator().manual_seed(seed)
        return [(name, _draw_values(shape, name, generator)) for name, shape in shapes]
    torch.manual_seed(seed)
    module = _build(model)
    shapes_of_module(module)
    params = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, param in params:
        if param.is_meta:
            raise ValueError(f"{model} returns {name} on the meta device, which has no values.")
    return [(name, _on_host(param)) for name, param in params]


def _on_host(param: torch.Tensor) -> torch.Tensor:
    """Return a parameter on the CPU, with its gradient."""
    if param.device.type == "cpu":
        return param
    host = param.detach().cpu().requires_grad_()
    host.grad = None if param.grad is None else param.grad.cpu()
    return host


def _check_host_memory(model: str, shapes: Sequence[NamedShape]) -> None:
    """Refuse a model that would have this process killed for lack of memory."""
    nbytes = 4 * count_elements(shapes)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > total:
        raise ValueError(
            f"{model} takes {nbytes / 1e9:.0f} GB in fp32, and this host has {total / 1e9:.0f} GB. "
            "Give a smaller model of the same kind."
        )


def _draw_values(shape: tuple[int, ...], name: str, generator: torch.Generator) -> torch.Tensor:
    if len(shape) > 1:
        drawn = torch.randn(shape, generator=generator) * 0.02
    else:
        drawn = torch.full(shape, float(name.endswith(".weight")))
    return drawn.requires_grad_()


def _build(model: str) -> nn.Module:
    module_name, colon, attribute = model.partition(":")
    if not colon:
        raise ValueError(
            f"Invalid model: {model!r}. Give one of {', '.join(BERT)}; a number of parameters, "
            "such as 10b; or package.module:callable, which returns a module."
        )
    try:
        build = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Invalid model: {model!r}. {error}.") from error
    built = build()
    if not isinstance(built, nn.Module):
        raise ValueError(f"Invalid model: {model!r}. It returns {built!r:.80}, not a module.")
    return built


def shapes_of_module(module: nn.Module) -> list[NamedShape]:
    """Return (name, shape) of each parameter that a module trains."""
    named = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient.")
    return named


def count_elements(shapes: Sequence[NamedShape]) -> int:
    """Return the number of elements."""
    return sum(math.prod(shape) for _, shape in shapes)


def _parse_count(text: str) -> int | None:
    units = {"k": 10**3, "m": 10**6, "b": 10**9}
    digits, unit = text[:-1], units.get(text[-1:].lower())
    try:
        numel = None if unit is None else int(float(digits) * unit)
    except (ValueError, OverflowError):
        return None
    if numel is not None and numel < 1:
        raise ValueError(f"Invalid model: {text!r}. Must be 1 or more parameters.")
    return numel


def _layers(numel: int) -> Iterator[NamedShape]:
    """Yield layers of transformers, 12 h^2 elements each, of about ``numel`` elements in all."""
    hidden = max(64, 64 * round((numel / 12 / 48) ** 0.5 / 64))
    for layer in range(max(1, round(numel / (12 * hidden * hidden)))):
        yield from _linear(f"layer.{layer}.qkv", hidden, 3 * hidden)
        yield from _linear(f"layer.{layer}.out", hidden, hidden)
        yield from _linear(f"layer.{layer}.up", hidden, 4 * hidden)
        yield from _linear(f"layer.{layer}.down", 4 * hidden, hidden)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _bert(size: _Bert) -> Iterator[NamedShape]:
    """Yield BERT's parameters for pretraining, both heads, with transformers' names."""
    hidden = size.hidden
    for name, rows in (("word", _VOCABULARY), ("position", _POSITIONS), ("token_type", 2)):
        yield f"bert.embeddings.{name}_embeddings.weight", (rows, hidden)
    yield from _norm("bert.embeddings.LayerNorm", hidden)
    for index in range(size.num_layers):
        layer = f"bert.encoder.layer.{index}"
        for name in ("query", "key", "value"):
            yield from _linear(f"{layer}.attention.self.{name}", hidden, hidden)
        yield from _linear(f"{layer}.attention.output.dense", hidden, hidden)
        yield from _norm(f"{layer}.attention.output.LayerNorm", hidden)
        yield from _linear(f"{layer}.intermediate.dense", hidden, 4 * hidden)
        yield from _linear(f"{layer}.output.dense", 4 * hidden, hidden)
        yield from _norm(f"{layer}.output.LayerNorm", hidden)
    yield from _linear("bert.pooler.dense", hidden, hidden)
    yield "cls.predictions.bias", (_VOCABULARY,)
    yield from _linear("cls.predictions.transform.dense", hidden, hidden)
    yield from _norm("cls.predictions.transform.LayerNorm", hidden)
    yield from _linear("cls.seq_relationship", hidden, 2)
