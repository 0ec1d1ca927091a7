"""Certificates: what an image showed on somebody's machine, signed, and shown by `buildkit targets`."""
