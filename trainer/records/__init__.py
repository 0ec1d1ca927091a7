"""Records of a run: metrics, samples, logs and reports."""
