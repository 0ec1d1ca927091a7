"""Stalls and slow workers: noticed, explained, shown."""
