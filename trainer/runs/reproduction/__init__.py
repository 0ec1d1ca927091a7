"""The same run again: what a run depends on and what came of it, checked and repeated."""
