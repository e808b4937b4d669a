"""Facts about torch.distributed backends that change how a collective is called."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class BackendTraits:
    """What a backend allows, beyond SUM and MAX on contiguous tensors that all of them have."""

    in_place_all_gather: bool
    """The input may be a slice of the output."""

    prefers_pairwise: bool = False
    """Sends and receives beat its own reduce-scatter and all-gather of CPU tensors."""

    aborts_on_mismatch: bool = False
    """The process is ended by a signal where ranks give a collective different sizes."""

    mismatch_code: str | None = None
    """What is in its errors where ranks launch different collectives; None: it does not compare."""

    changes_inputs: bool | None = False
    """A reduce-scatter leaves anything in its input; None: not known before the first has run."""


_TRAITS = {
    "gloo": BackendTraits(in_place_all_gather=True, prefers_pairwise=True, aborts_on_mismatch=True),
    "nccl": BackendTraits(in_place_all_gather=True),
    # Its documents can be read as forbidding overlap of send and receive buffers: it gets a staged
    # copy until the in-place form has been run on hardware. EI0005 is its word for a mismatch.
    # Zero-copy is TORCH_HCCL_ZERO_COPY's to turn on, and beta: it is looked for without that, too.
    "hccl": BackendTraits(in_place_all_gather=False, mismatch_code="EI0005", changes_inputs=None),
}

_CAUTIOUS = BackendTraits(in_place_all_gather=False, changes_inputs=None)
"""Of a backend that is not listed."""


def traits_of(backend: str) -> BackendTraits:
    """Return the traits of ``backend``, a name as ``torch.distributed.get_backend`` gives it."""
    traits = _TRAITS.get(backend, _CAUTIOUS)
    if backend == "hccl" and os.environ.get("TORCH_HCCL_ZERO_COPY", "0") not in ("", "0"):
        # CANN 9.0, "Zero-copy: Before You Start". (Not run on hardware.)
        return replace(traits, changes_inputs=True)
    return traits
