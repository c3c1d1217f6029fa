"""What is done with weights besides training: scores, neighbours, soups, calibration; a sweep of the learning rate."""
