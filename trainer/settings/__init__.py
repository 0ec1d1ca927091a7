"""Sections of the one tree of settings, `trainer/config.py`: each with its units, defaults and documentation."""
