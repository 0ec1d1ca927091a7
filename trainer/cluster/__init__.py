"""Ray nodes, slots and groups of workers."""
