"""`launch`, the image's entrypoint: finds the job's nodes, forms one Ray cluster and runs the command on it."""
