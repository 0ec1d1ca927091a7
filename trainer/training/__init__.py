"""What a training rank does: models, FSDP, gradients, weights and checkpoints. Knows nothing of Ray."""
