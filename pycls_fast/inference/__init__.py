"""Inference with trained weights: predictions, features and maps for the user's own images."""

from pycls_fast.inference.classifier import Classifier, Guess, Prediction, load

__all__ = ["Classifier", "Guess", "Prediction", "load"]
