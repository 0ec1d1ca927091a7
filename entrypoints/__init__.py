"""Runs inside the container: finds the peers, forms one Ray cluster and runs the command on it."""
