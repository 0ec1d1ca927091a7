"""Detects and explains hangs and stragglers."""
