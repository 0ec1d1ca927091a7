"""Kinds of training run, and what they share: placement, the loop over steps, checkpoints, watchdogs."""
