"""`pycls-fast maps` as a file."""

from pycls_fast.cli import main

if __name__ == "__main__":
    main("maps")
