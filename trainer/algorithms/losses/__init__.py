"""Parts of the losses: aggregation, clipping, divergences, KL, values and distillation."""
