"""MPI launchers: one file each, found by the registry."""
