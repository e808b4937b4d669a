"""Which faults there are, and what the survivors of each have to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults import ends, fsdp, muon, programs
from tests.faults.programs import GROUP_TIMEOUT_S, Job


@dataclass(frozen=True)
class Fault:
    """A program and what has to be said of it.

    Args:
        program: what happens.
        names: texts that the error of every survivor has to contain.
        blames: a text that it has to contain, and no other rank's number than that of the last one;
            None: any text.
        bound_s: seconds in which it has to come.
        ended: how the faulty rank's process ends, where not by an error: "killed", "done".
        only: the collectives that have this fault; empty: all.
    """

    program: Callable[[Job], None]
    names: tuple[str, ...] = ()
    blames: str | None = None
    bound_s: float = 2.0
    ended: str = "error"
    only: tuple[str, ...] = ()


_AFTER_TIMEOUT_S = GROUP_TIMEOUT_S + 2.0
_ENDED = "ended "
_ANSWER = " did not "

FAULTS = {
    fault.program.__name__: fault
    for fault in (
        Fault(programs.unfreeze, ("unfrozen layer1.weight",)),
        Fault(programs.unfreeze_another, ("unfrozen layer1.weight", "unfrozen layer2.weight")),
        Fault(programs.leave_a_grad, ("unfrozen layer1.weight",)),
        Fault(programs.lr_differs, ("lr = 0.01 in group 0", "lr = 0.005 in group 0")),
        Fault(programs.weight_decay_differs, ("weight_decay = 0.3 in group 0",)),
        Fault(programs.betas_differ, ("betas = (0.8, 0.9) in group 0",)),
        Fault(
            programs.model_loaded_on_one, ("params from layer0.weight to layer3.bias, by a sample",)
        ),
        Fault(programs.state_loaded_on_one, ("load_state_dict()", "step()")),
        Fault(programs.another_checkpoint, ("a state of step 2", "a state of step 3")),
        Fault(programs.sparse_gradient, ("layer0.weight is sparse", "sparse=False")),
        Fault(programs.gradient_of_another_size, ("layer0.weight", "9 elements")),
        Fault(programs.reallocated_param, ("layer0.weight", "rebind()")),
        Fault(programs.replaced_param, ("param_groups hold other parameters",)),
        Fault(programs.halved_model, ("layer0.weight",)),
        Fault(programs.closure_raises, ("batch 17 cannot be read",)),
        Fault(programs.closure_is_interrupted, ("KeyboardInterrupt",)),
        Fault(programs.norm_on_one, ("grad_norm()", "step()")),
        Fault(programs.clip_on_one, ("clip_grad_norm()", "step()")),
        Fault(programs.clip_bound_differs, ("max_norm = 1.0", "max_norm = 2.0")),
        Fault(programs.bad_clip_bound, ("max_norm: nan",)),
        Fault(programs.edit_after_clip, ("Gradients changed between clip_grad_norm() and step()",)),
        Fault(programs.consolidate_on_one, ("consolidate_state_dict()", "step()")),
        Fault(programs.consolidate_elsewhere, ("to = 0", "to = 1")),
        Fault(programs.sharded_state_on_one, ("sharded_state_dict()", "step()")),
        Fault(programs.group_on_one, ("add_param_group()", "step()")),
        Fault(programs.group_of_another_shape, ("new (3,)", "new (4,)")),
        Fault(programs.build_on_one, ("building an optimizer", "step()")),
        Fault(programs.build_other_buckets, ("bucket_cap_mb=1", "bucket_cap_mb=2")),
        Fault(programs.build_other_collectives, ("building an optimizer with collectives=",)),
        Fault(programs.build_another_class, ("Ranks disagree about the optimizer",)),
        Fault(programs.build_with_an_error, ("Invalid learning rate: -1.0",)),
        Fault(
            programs.two_in_opposite_order,
            ("has optimizer 1 of", "has optimizer 2 of"),
        ),
        Fault(programs.scaler_on_one, ("under a gradient scaler", "without a gradient scaler")),
        Fault(programs.sharded_scaler_on_one, ("ShardedGradScaler", "step()")),
        Fault(programs.not_averaged, ("grads_are_reduced=True", "gradient of layer")),
        Fault(ends.killed, (), _ENDED, ended="killed"),
        Fault(ends.killed_in_step, (), _ENDED, ended="killed"),
        Fault(ends.killed_in_all_gather, (), _ENDED, ended="killed"),
        Fault(ends.killed_in_agreement, (), _ENDED, ended="killed", only=("pairwise", "native")),
        Fault(ends.killed_while_building, (), _ENDED, ended="killed"),
        Fault(ends.killed_before_a_group, (), _ENDED, ended="killed", only=("pairwise", "native")),
        Fault(ends.fails_before_a_group, ("Too many open files",), only=("pairwise", "native")),
        Fault(ends.killed_in_save, (), _ENDED, ended="killed"),
        Fault(ends.killed_in_load_latest, (), _ENDED, ended="killed"),
        Fault(ends.leaves_early, (), _ENDED, ended="done"),
        Fault(ends.fails_in_forward, (), _ENDED),
        Fault(ends.saves_early, ("consolidate_state_dict()", "step()")),
        Fault(ends.hangs, (), _ANSWER, bound_s=_AFTER_TIMEOUT_S, ended="killed"),
        Fault(ends.stopped, (), _ANSWER, bound_s=_AFTER_TIMEOUT_S, ended="killed"),
        Fault(programs.destroyed_group, ("process group was destroyed",)),
        # It waits half a minute for the others to come back.
        Fault(programs.goes_on_after_an_error, ("layer0.weight is sparse",), ended="killed"),
        Fault(fsdp.absent_gradient, ("without a gradient: 1.weight",)),
        Fault(fsdp.lr_differs, ("lr = 0.01 in group 0", "lr = 0.005 in group 0")),
        Fault(fsdp.bad_lr, ("Invalid learning rate: -1.0",)),
        Fault(fsdp.clip_bound_differs, ("max_norm = 1.0", "max_norm = 2.0")),
        Fault(fsdp.replaced_param, ("param_groups hold other parameters",)),
        Fault(fsdp.state_loaded_on_one, ("load_state_dict()", "clip_grad_norm()")),
        Fault(fsdp.edited_state, ("has no exp_avg",)),
        Fault(fsdp.build_another_class, ("Ranks disagree about the optimizer",)),
        Fault(fsdp.killed, (), _ENDED, ended="killed"),
        Fault(fsdp.disc_full_in_save, ("No space left on device",)),
        Fault(fsdp.fails_in_save, ("no memory for 1 shard",)),
        Fault(fsdp.killed_in_save, (), _ENDED, ended="killed"),
        Fault(fsdp.disc_fails_in_load, ("Input/output error",)),
        Fault(fsdp.fails_in_load, ("no memory for 1 shard",)),
        Fault(fsdp.killed_in_load, (), _ENDED, ended="killed"),
        Fault(muon.fails_between, ("no memory for 1 matrix",)),
        Fault(muon.killed_between, (), _ENDED, ended="killed"),
        Fault(muon.ns_steps_differ, ("ns_steps = 3 in group 0", "ns_steps = 5 in group 0")),
        Fault(muon.split_changes, ("use_muon or split of a parameter group has changed",)),
    )
}
