"""Tools whose command lines `trainer import` reads: one file each, with a row."""
