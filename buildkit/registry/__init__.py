"""Talking to OCI registries."""
