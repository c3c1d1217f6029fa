"""What is minimised, and how. Begin with `choices.py`, what a configuration can name; it imports no torch."""
