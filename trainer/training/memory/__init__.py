"""What a pass takes of a GPU's memory, and how it is given back."""
