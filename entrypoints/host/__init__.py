"""This host: its devices, network and image, and the environment variables that follow from them."""
