"""Corrections for the gap between engine and trainer, one file each."""
