"""`python -m pycls_fast VERB ...`: see `cli.py`."""

from pycls_fast.cli import main

if __name__ == "__main__":
    main()
