"""Inference with trained weights: predictions, features and maps for the user's own images."""

from pycls_fast.inference.classifier import Classifier, load
from pycls_fast.inference.images import GivenImages, find_images, given_images
from pycls_fast.inference.predictions import Guess, Prediction

__all__ = ["Classifier", "GivenImages", "Guess", "Prediction", "find_images", "given_images", "load"]
