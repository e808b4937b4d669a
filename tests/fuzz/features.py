"""What programs may contain. What is off waits for the mend of a known fault, named beside it."""

from __future__ import annotations

FEATURES: dict[str, bool] = {
    # One rank alone unfreezes or freezes, or has a gradient on a frozen parameter. All ranks must
    # raise within seconds, or all go on as the reference does.
    "one_rank_faults": True,
    # One rank alone has an error of its own: a re-allocated or a sparse one. As above.
    "local_errors": True,
    # zero_grad(set_to_none=False) while a caller holds a gradient that is no longer a p.grad.
    "zero_in_place_after_keep": True,
    # Optimizer.zero_grad(set_to_none=False) zeroes gradients of frozen parameters, as torch does;
    # it sets them to None, and a zero would count as a gradient.
    "zero_in_place_while_frozen": True,
    # SGD of bf16 or fp16 parameters is given a momentum after it has trained without one.
    "late_momentum_in_low_precision": True,
    # A kept gradient that is still a p.grad is the one that later backwards add to, also after it
    # was handed to another parameter or while an older optimizer is alive. It may get a copy's
    # values instead; p.grad itself has the right ones.
    "kept_gradients_accumulate": True,
    # p.grad stays as it is through a step under plain GradScalers whose scales differ; it is
    # divided by the scale in place where it lies in its slot.
    "gradients_under_unequal_scales": True,
    # maximize=True, in the constructor or in a group.
    "maximize": True,
    # register_state_dict_pre_hook and its like.
    "state_dict_hooks": True,
    # The optimizer gets a module with buffers, or is told of one; ranks write to the buffers.
    "modules": True,
    # torch.nn.utils.clip_grad_norm_() of each rank's own gradients. It is warned of.
    "torch_clips": True,
    # One function of torch takes all parameters at once, while they are in flight.
    "joined": True,
    # What has always been promised.
    "low_precision": True,
    "scalers": True,
    "clips": True,
    "hooks": True,
    "kept_gradients": True,
    "reloads": True,
    "added_groups": True,
    "edits": True,
    "delays": True,
    "freezing": True,
    "reduced_elsewhere": True,
}
