"""The batch of a step, split for ranks and micro-batches."""
