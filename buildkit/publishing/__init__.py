"""Publishing an image: release, bills of materials, provenance, signature, and verification."""
