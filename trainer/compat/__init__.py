"""verl's settings and Hydra's syntax, translated into ours."""
