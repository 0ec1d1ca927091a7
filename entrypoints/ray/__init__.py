"""The Ray cluster of a job: its processes, ports and directories, and attaching to it."""
