"""Every setting with its default and description, and the code that reads settings."""
