"""Entry points of verl-recipe."""
