"""Files of a run directory: complete or absent, checked, with a single writer."""
