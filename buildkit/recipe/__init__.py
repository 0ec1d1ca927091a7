"""What an image is made of: the matrix, the environment tables, the lock, the Dockerfile."""
