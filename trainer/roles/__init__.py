"""What each role does on a step, one plain class per file; `trainer.cluster.workers` runs them as Ray actors."""
