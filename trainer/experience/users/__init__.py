"""Simulated users, one per file."""
