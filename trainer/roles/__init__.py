"""The five roles, one plain class per file; `trainer.cluster.workers` runs them as Ray actors."""
