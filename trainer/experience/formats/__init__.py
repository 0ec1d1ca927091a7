"""Formats in which models write calls of tools, one per file."""
