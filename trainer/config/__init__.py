"""Every setting, with its default and its documentation, and how settings are read."""
