"""Rules for keys that several sections have, or that verl reads together."""
