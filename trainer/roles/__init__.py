"""What each role does on a step, one plain class per file; `trainer.cluster` runs them as Ray actors."""
