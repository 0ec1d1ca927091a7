"""Publishing an image: release, bill of materials, provenance, signature and the check of all of it."""
