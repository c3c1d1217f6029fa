"""The commands of `pycls-fast`, a `Command` each under the verb's name: its keys, its help, what it runs.

What needs torch is imported when a command runs: it takes seconds, and mistakes are reported before that.
"""
