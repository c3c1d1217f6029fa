"""Image-classification training with every optimization a measured switch."""

__version__ = "0.1.0"
