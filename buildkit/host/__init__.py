"""This machine: hardware, settings, accelerators."""
