"""The verbs of `pycls-fast`, a class each, such as `TrainVerb`: its keys, its help, what it runs.

What needs torch is imported when a command runs: it takes seconds, and mistakes are reported before that.
"""
