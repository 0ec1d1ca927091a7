"""Weights from the actor to an engine, on one GPU and across GPUs."""
