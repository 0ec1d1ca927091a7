"""The gap between the policy that sampled and the policy that learns: ratios, weights, rejection."""
