"""Measurements, each in a process of its own: timing, rounding, gradients, and the input pipeline by stage."""
