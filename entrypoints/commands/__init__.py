"""What `launch` does besides launching."""
