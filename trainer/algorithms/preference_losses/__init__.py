"""Losses of preference pairs: one file each, with a row."""
