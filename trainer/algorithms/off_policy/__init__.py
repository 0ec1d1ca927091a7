"""Off-policy correction: ratios, importance weights, rejection."""
