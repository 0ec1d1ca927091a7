"""What a run writes down and shows: metrics, samples, logs and reports."""
