"""Tools that a policy may call, one per file."""
