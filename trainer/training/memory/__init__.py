"""GPU memory of passes: allocation, offload and release."""
