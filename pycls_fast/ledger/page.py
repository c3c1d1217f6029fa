"""stub"""

from pathlib import Path
from typing import Any


def write_page(record: dict[str, Any], folder: Path) -> None:
    """stub"""
