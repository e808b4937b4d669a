"""Random programs, run by the sharded optimizers and by references that know nothing of shards.

Modules:
    program: what a program is: parameters, an optimizer, operations; how it prints.
    features: the table of what programs may contain; what is left out for a known fault.
    choices: optimizers with their options, sharding options.
    draw, between, generate: from a seed to a program.
    local: one rank's parameters and gradients, plain torch, used by both sides.
    exact: update rules in fp32, one tensor at a time: the same bits are expected.
    engines: torch.optim and the oracles of tests/support/oracles*.py in double precision.
    ranks: the gradients of all ranks in one process, and their mean.
    reference: interprets a program for all ranks; imports nothing of shardfuse.
    job: one rank's model, sharded optimizer, scaler and hooks.
    actor: interprets a program as one rank; with job and fsdp, all that imports shardfuse.
    fsdp: programs over models that FSDP2 has sharded, and one rank that does them.
    compare: where the two differ, in words.
    worlds: processes joined by gloo that run many programs one after another.
    shrink: drops operations while a program still fails.

    python -m tests.fuzz --programs 1000 --first-seed 0 --worlds 1,2,3
    python -m tests.fuzz --seed 17
    python -m tests.fuzz --fsdp --programs 300 --worlds 1,2,3,4
    python -m tests.fuzz --optimizer ShardedMuon --programs 300 --worlds 1,2,3,4
"""
