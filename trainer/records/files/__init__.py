"""The files of a run directory: whole or absent, checked, with one writer."""
