"""Inference with trained weights: predictions, features and maps for the user's own images."""

from pycls_fast.inference.classifier import Classifier, load
from pycls_fast.inference.predictions import Guess, Prediction

__all__ = ["Classifier", "Guess", "Prediction", "load"]
