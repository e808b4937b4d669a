"""Scripts for Ascend NPUs, and what looks at their commands without one."""
