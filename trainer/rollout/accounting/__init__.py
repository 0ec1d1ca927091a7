"""Shortcuts through vLLM's accounting of responses and of its cache, with the same answers."""
