"""verl's settings, translated into ours: one file per section of verl's configuration."""
