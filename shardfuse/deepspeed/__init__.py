"""DeepSpeed plug-in: shardfuse's optimizers by their names in ds_config.json.

    import shardfuse.deepspeed   # anywhere before deepspeed.initialize()

    {"optimizer": {"type": "ShardedLamb", "params": {"lr": 1e-3, "weight_decay": 0.01}}, ...}

The import is needed because DeepSpeed does not discover plug-ins. Nothing else is needed, because
DeepSpeed builds optimizers inside ``initialize()``.

    stage 0         shardfuse shards: reduce-scatter, update, all-gather; the engine calls it
    stage 1, 2      DeepSpeed shards: our rules run on its flat partitions, with exact norms of
                    whole tensors, wherever a partition cuts them
    anything else   ``initialize()`` raises, and names the line of the JSON to change
"""

from shardfuse.deepspeed.registry import is_registered, register, unregister

__all__ = ["is_registered", "register", "unregister"]

register()
