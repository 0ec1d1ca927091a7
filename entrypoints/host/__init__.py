"""What this host is, and the environment variables that follow from it."""
