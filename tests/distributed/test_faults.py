"""Some of the faults that `python -m tests.faults` runs: those that no other test has."""

from __future__ import annotations

import pytest

from tests.faults.runner import Setting, run
from tests.faults.table import FAULTS

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call"),
]

# Of a machine that runs other things as well; the command keeps to the bounds of the table.
SLOWNESS_S = 10.0

SETTINGS = {
    "build_another_class": Setting("native", "adam", 2),
    "build_other_collectives": Setting("auto", "adam", 2),
    "closure_is_interrupted": Setting("pairwise", "lamb", 2),
    "goes_on_after_an_error": Setting("pairwise", "adam", 3),
    "group_on_one": Setting("native", "lamb", 3),
    "halved_model": Setting("auto", "adam", 3),
    "killed": Setting("auto", "adam", 3),
    "killed_in_load_latest": Setting("auto", "adam", 3),
    "killed_in_step": Setting("auto", "lamb", 2),
    "fsdp_absent_gradient": Setting("auto", "lamb", 2),
    "fsdp_state_loaded_on_one": Setting("auto", "adam", 2),
    "fsdp_killed": Setting("native", "lamb", 3),
    "fsdp_disc_full_in_save": Setting("auto", "lamb", 2),
    "fsdp_killed_in_save": Setting("native", "adam", 2),
    "fsdp_fails_in_load": Setting("pairwise", "adam", 3),
    "muon_fails_between": Setting("auto", "adam", 3),
    "muon_killed_between": Setting("native", "adam", 3),
    "muon_split_changes": Setting("pairwise", "adam", 2),
    "fails_in_forward": Setting("native", "adam", 2),
    "leaves_early": Setting("pairwise", "adam", 3),
    "saves_early": Setting("native", "adam", 3),
    "not_averaged": Setting("native", "lamb", 2),
    "scaler_on_one": Setting("pairwise", "adam", 2),
    "two_in_opposite_order": Setting("auto", "lamb", 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_survivors_say_what_happened(name: str) -> None:
    """No survivor is silent or hangs, and each names the fault."""
    setting, fault = SETTINGS[name], FAULTS[name]
    bad = setting.world_size - 1
    bound_s = fault.bound_s + SLOWNESS_S
    for ending in run(name, setting):
        verdict = ending.verdict(fault, bad=bad, bound_s=bound_s)
        assert verdict == "ok", f"rank {ending.rank}: {ending.message}"
