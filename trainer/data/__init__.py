"""Datasets, and the batch of responses that a step works on."""
