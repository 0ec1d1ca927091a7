"""The Ray cluster of a job: its processes, ports, directories, and commands beside it."""
