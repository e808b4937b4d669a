"""What torch calls when it is imported where the stand-in is named among its backends.

A folder on the path with an entry point ``torch.backends``, as torch_npu's package has one, gives a
process that knows nothing of tests the device "npu" and the process group "hccl".
"""

from __future__ import annotations


def load() -> None:
    """Have torch know the device and its process group."""
    from tests.support import contract, contract_terms, npu

    npu.load()
    contract.register(contract_terms.Terms(devices=("npu",)))
