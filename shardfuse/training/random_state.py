"""The random number generators of a process, as they are saved."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """The global generators of torch (CPU and the current accelerator), Python, and numpy if used.

    Every rank has its own generators: save a RandomState inside ``PerRank``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states as plain data."""
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        device = _accelerator()
        if device is not None:  # not run on hardware
            state["accelerator"] = torch.get_device_module(device).get_rng_state()
        if "numpy" in sys.modules:
            name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
            numbers = (keys.tolist(), int(position), int(has_gauss), float(cached))
            state["numpy"] = (str(name), *numbers)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators.

        Args:
            state: the result of state_dict().
        """
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        device = _accelerator()
        if device is not None and "accelerator" in state:  # not run on hardware
            torch.get_device_module(device).set_rng_state(state["accelerator"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)
