"""Rules for the keys of one section of verl's settings per file."""
