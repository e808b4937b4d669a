"""Predicted time of a step for given speeds of link and memory: a model, not a measurement.

[Note: model] Backward makes gradients at a constant rate, in the order of the buckets.
The link transfers one bucket at a time, each as soon as it is complete. If a rule needs no norms, a
bucket is updated once it is reduced. Under Muon all are reduced before the matrices are exchanged,
transformed, at the rate of Speeds.flops, and exchanged back. Gathers start in the order of forward
once all buckets are updated. Forward runs as far as its parameters have been gathered. Steps follow
each other; the last of six counts. Not modelled: that sockets take time of the cores that compute,
and everything not named here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardfuse.plan.budget import BucketCost, Budget

_NUM_STEPS = 6


@dataclass(frozen=True)
class Speeds:
    """Speeds of a rank.

    Attributes:
        link: bytes per second that it can send, and receive at the same time.
        latency_s: seconds of each collective.
        memory: bytes per second that an update reads and writes.
        flops: operations per second of products of matrices in an update; infinite takes no time.
    """

    link: float
    latency_s: float = 20e-6
    memory: float = 10e9
    flops: float = math.inf

    def __post_init__(self) -> None:
        for name, unit in (("link", "bytes"), ("memory", "bytes"), ("flops", "operations")):
            if not getattr(self, name) > 0:
                raise ValueError(f"Invalid {name}: {getattr(self, name)}. Must be > 0 {unit}/s.")
        if not 0 <= self.latency_s < float("inf"):
            raise ValueError(f"Invalid latency_s: {self.latency_s}. Must be >= 0, and a number.")


@dataclass(frozen=True)
class Times:
    """Seconds of a step.

    Attributes:
        compute: forward and backward.
        traffic: all bytes of a step, one after another.
        step, without_overlap, with_overlap: shardfuse as configured, with nothing overlapped, and
            with gradients sent during backward and parameters gathered during forward.
        ddp: replicated; gradients all-reduced during backward, everything updated on every rank.
    """

    compute: float
    traffic: float
    step: float
    without_overlap: float
    with_overlap: float
    ddp: float

    @property
    def exposed(self) -> float:
        """How much longer than compute a step takes."""
        return self.step - self.compute


def predict(budget: Budget, speeds: Speeds, forward_s: float, backward_s: float) -> Times:
    """Return the times of a step with the given forward and backward; see [Note: model].

    Raises:
        ValueError: a time is negative or not finite.
    """
    for name, value in (("forward", forward_s), ("backward", backward_s)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"Invalid time of {name}: {value * 1e3} ms. Must be >= 0.")
    buckets, exchange = budget.buckets, budget.exchange
    exchange_s = between_s = whole_s = 0.0
    if exchange is not None:
        exchange_s = exchange.sent_nbytes / speeds.link + exchange.number * speeds.latency_s
        between_s = exchange_s + exchange.flops / speeds.flops
        whole_s = exchange.total_flops / speeds.flops
    times = forward_s, backward_s
    one = _StepClock(buckets, speeds, *times, needs_all=budget.needs_all, between_s=between_s)
    ranks = budget.world_size
    whole = [
        BucketCost(
            share=bucket.share,
            reduce=2 * bucket.share * budget.numel * _itemsize(budget) * (ranks - 1) / ranks,
            gather=0.0,
            update=bucket.whole_update,
            whole_update=bucket.whole_update,
        )
        for bucket in buckets
    ]
    replicated = _StepClock(whole, speeds, *times, needs_all=True, between_s=whole_s)
    return Times(
        compute=forward_s + backward_s,
        traffic=exchange_s + sum(one.seconds(b.reduce) + one.seconds(b.gather) for b in buckets),
        step=one.step(*budget.overlaps),
        without_overlap=one.step(False, False),
        with_overlap=one.step(True, True),
        ddp=replicated.step(True, False),
    )


def _itemsize(budget: Budget) -> float:
    return budget.memory["parameters"] / budget.padded_numel


class _StepClock:
    """Simulates compute and link."""

    def __init__(
        self,
        buckets: tuple[BucketCost, ...] | list[BucketCost],
        speeds: Speeds,
        forward_s: float,
        backward_s: float,
        *,
        needs_all: bool,
        between_s: float,
    ) -> None:
        self._buckets, self._speeds, self._needs_all = buckets, speeds, needs_all
        self._between_s = between_s  # from the last sum to the first update
        self._forward_s, self._backward_s = forward_s, backward_s

    def seconds(self, nbytes: float) -> float:
        """Return how long a collective occupies the link."""
        return nbytes / self._speeds.link + self._speeds.latency_s if nbytes else 0.0

    def step(self, overlaps_grads: bool, overlaps_params: bool) -> float:
        """Return the seconds of a step in a sequence of steps."""
        now = link = before = 0.0
        arrived = [0.0] * len(self._buckets)
        for _ in range(_NUM_STEPS):
            before = now
            for bucket, at in zip(reversed(self._buckets), reversed(arrived), strict=True):
                now = max(now, at) + self._forward_s * bucket.share
            ready = []
            for bucket in self._buckets:
                now += self._backward_s * bucket.share
                ready.append(now)
            now, link = self._reduce(now, link, ready if overlaps_grads else [now] * len(ready))
            for index in reversed(range(len(self._buckets))):
                link = max(link, now) + self.seconds(self._buckets[index].gather)
                arrived[index] = link
            if not overlaps_params:
                now = max(now, link)
        return now - before

    def _reduce(self, now: float, link: float, ready: list[float]) -> tuple[float, float]:
        """Return when all buckets are updated, and when the link is free."""
        arrived = []
        for bucket, at in zip(self._buckets, ready, strict=True):
            link = max(link, at) + self.seconds(bucket.reduce)
            arrived.append(link)
        if self._needs_all and arrived:
            now = max(now, arrived[-1]) + self._between_s
        for bucket, at in zip(self._buckets, arrived, strict=True):
            now = max(now, at) + bucket.update / self._speeds.memory
        return now, link
