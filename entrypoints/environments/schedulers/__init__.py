"""Resource managers: one file each, found by the registry."""
