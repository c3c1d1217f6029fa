"""The commands of `pycls-fast`, a file each: its keys, its help, and `run`, which `cli.py` calls."""
