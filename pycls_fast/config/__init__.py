"""Configuration: Hydra composes, pydantic validates. Read `compose.py` first, then `launch.py`."""

from pycls_fast.choice import Section
from pycls_fast.config.compose import load_config
from pycls_fast.config.conflicts import Purpose
from pycls_fast.config.launch import Verb, command_line
from pycls_fast.config.reuse import validate_saved
from pycls_fast.config.run import RunConfig
from pycls_fast.config.this_command import command_alone, is_command, overrides_name, typed_keys, variant
from pycls_fast.values import ModuleNames

__all__ = [
    "ModuleNames",
    "Purpose",
    "RunConfig",
    "Section",
    "Verb",
    "command_alone",
    "command_line",
    "is_command",
    "load_config",
    "overrides_name",
    "typed_keys",
    "validate_saved",
    "variant",
]
