"""Random programs, run by the sharded optimizers and by references that know nothing of shards.

program.py    what a program is: parameters, an optimizer, a list of operations; how it prints
features.py   the table of what programs may contain, and what is left out for a known fault
choices.py    optimizers with their options, sharding options
generate.py   seed -> program
local.py      one rank's parameters and gradients: plain torch, used by both sides
exact.py      update rules in fp32, one tensor at a time: same bits expected
engines.py    torch.optim and the oracles of tests/oracles*.py in double precision
reference.py  interprets a program for all ranks in one process; imports nothing of shardfuse
actor.py      interprets it as one rank, with a sharded optimizer, and compares
worlds.py     processes joined by gloo that run many programs one after another
shrink.py     drops operations while a program still fails

python -m tests.fuzz --programs 1000 --first-seed 0 --worlds 1,2,3
python -m tests.fuzz --seed 17
"""
