"""Memory, traffic and times of a training run, computed without a device."""

from shardfuse.plan.budget import Budget, plan
from shardfuse.plan.fsdp import plan_fsdp
from shardfuse.plan.matrices import Collective
from shardfuse.plan.models import shapes_of
from shardfuse.plan.timing import Speeds, Times, predict

__all__ = ["Budget", "Collective", "Speeds", "Times", "plan", "plan_fsdp", "predict", "shapes_of"]
