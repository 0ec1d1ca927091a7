"""The entry points of verl."""
