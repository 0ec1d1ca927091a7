"""Sampling responses: rollout engines behind one Protocol, and all engines of a run as one."""
