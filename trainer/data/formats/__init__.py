"""The formats of rows, messages and tools."""
