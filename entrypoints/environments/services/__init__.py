"""Managed services: one file each, found by the registry."""
