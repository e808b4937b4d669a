"""Streams of a device: a model may use several.

Autograd runs a node, and so the hook of a gradient, on the stream of the node's forward. A backward
joins all of them when it ends; what leaves before that has to wait for those it was made on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def current_stream(device: torch.device) -> Any:
    """Return what this thread launches on now; None on the CPU, which has none."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).current_stream(device)


class Streams:
    """Those on which the present backward makes gradients, until something waits for them."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._noted: list[Any] = []
        self._are_several = False  # whether there ever was more than one

    def note(self, device: torch.device) -> None:
        """Note that a gradient was made on the current stream."""
        self._device, stream = device, current_stream(device)
        if stream is not None and stream not in self._noted:
            self._noted.append(stream)
            self._are_several |= len(self._noted) > 1

    def join(self) -> None:
        """Have the current stream wait for what was launched on the others, and stand for them."""
        if not self._noted:
            return
        current = current_stream(self._device)
        for stream in self._noted:
            if stream != current:
                current.wait_stream(stream)
        self._noted = [current]

    def end(self) -> None:
        """Join them, as at the end of a backward, also of one that has failed; forget them."""
        self.join()
        self._noted.clear()

    def hold(self, grad: Tensor) -> None:
        """Keep the memory of ``grad`` as it is until the current stream has read it.

        It belongs to the stream that it was made on, which would use it again at once.
        """
        if self._are_several:
            grad.record_stream(current_stream(grad.device))
