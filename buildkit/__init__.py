"""Builds, runs and tests Slipway's container images on the host."""
