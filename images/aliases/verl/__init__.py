"""The names of verl that launch lines and dataset classes use, backed by this trainer.

An installed verl comes first on the path, so this package is only found where there is none.
"""
