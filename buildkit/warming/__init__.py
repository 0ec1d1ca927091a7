"""Warm caches: compiled code that one machine packs and others start with."""
