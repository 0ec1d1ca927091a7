"""Process groups of ranks, sharding, and checkpoints of shards."""
