"""`pycls-fast runs` as a file."""

from pycls_fast.cli import main

if __name__ == "__main__":
    main("runs")
