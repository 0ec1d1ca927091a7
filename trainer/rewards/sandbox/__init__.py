"""Programs of a response, run in a sandbox here or on a server."""
