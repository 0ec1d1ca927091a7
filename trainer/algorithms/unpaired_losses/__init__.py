"""Losses of single responses with a label: one file each."""
