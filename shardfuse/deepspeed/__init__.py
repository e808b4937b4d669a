"""DeepSpeed plug-in: shardfuse's optimizers by their names in ds_config.json.

    import shardfuse.deepspeed   # anywhere before deepspeed.initialize()

    {"optimizer": {"type": "ShardedLamb", "params": {"lr": 1e-3, "weight_decay": 0.01}}, ...}

This import is all that is needed. DeepSpeed looks for plug-ins nowhere, so that something has to be
imported, and it builds optimizers deep inside ``initialize()``, so that nothing has to be called.

    stage 0         shardfuse shards: reduce-scatter, update, all-gather; the engine drives
    stage 1, 2      DeepSpeed shards: our rules run on its flat partitions, with exact norms of
                    whole tensors, wherever a partition cuts them
    anything else   is refused by ``initialize()``, with the line of the JSON to change
"""

from shardfuse.deepspeed.registry import is_registered, register, unregister

__all__ = ["is_registered", "register", "unregister"]

register()
