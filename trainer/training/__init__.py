"""The work of a training rank: FSDP, gradients, weights and checkpoints. Does not import Ray."""
