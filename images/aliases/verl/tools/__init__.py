"""The base of tools that users write, and the tools that others derive from."""
