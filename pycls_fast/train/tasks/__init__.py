"""What is done with weights besides training: score, nearest neighbours, a sweep of the learning rate."""
