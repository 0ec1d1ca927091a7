"""The network between nodes: name resolution, connections, the shared secret, the control channel."""
