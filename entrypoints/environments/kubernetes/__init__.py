"""Controllers of Kubernetes: one file each, found by the registry."""
