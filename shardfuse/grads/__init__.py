"""Gradients on their way to shards: full (stage 1), sharded (stage 2), or reduced elsewhere."""
