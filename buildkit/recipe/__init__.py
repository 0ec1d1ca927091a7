"""The recipe of an image: matrix, environment tables, lock, Dockerfile."""
