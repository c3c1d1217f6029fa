"""Making packed datasets and checking any source: what `tools/prepare_data.py` does."""

from pycls_fast.data.packing.packer import pack
from pycls_fast.data.packing.stored_image import PackSettings
from pycls_fast.data.packing.verifier import verify

__all__ = ["PackSettings", "pack", "verify"]
