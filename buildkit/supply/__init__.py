"""Supplies the parts of an image, bases and wheels, and resolves them into a lock."""
