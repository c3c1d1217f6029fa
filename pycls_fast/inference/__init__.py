"""Using what was trained: predictions, features and maps of images that somebody has."""

from pycls_fast.inference.classifier import Classifier, load
from pycls_fast.inference.images import GivenImages, find_images, given_images
from pycls_fast.inference.records import Guess, Prediction

__all__ = ["Classifier", "GivenImages", "Guess", "Prediction", "find_images", "given_images", "load"]
