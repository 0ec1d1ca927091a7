"""Ray: nodes, slots, groups of workers, and typed calls to them."""
