"""Where images come from: one file per layout. Read `base.py` first, then `folders.py`."""
