"""Entry points of verl."""
