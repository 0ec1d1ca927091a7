"""The base of simulated users."""
