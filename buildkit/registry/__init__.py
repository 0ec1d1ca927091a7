"""A client for OCI image registries."""
