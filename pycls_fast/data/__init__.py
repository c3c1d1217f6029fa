"""Images from disk to the device: sources, decoding, augmentation, sampling, loading, copy, mixing.

Read `dataset.py` first: one image from its source to its batch; then `sampling.py`, which decides the order.
"""
