"""Sending the trained weights to the rollout engines."""
