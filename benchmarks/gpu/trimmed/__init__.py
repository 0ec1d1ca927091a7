"""Whether packages that are trimmed like an image's still work."""
