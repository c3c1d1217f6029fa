"""Configuration: Hydra composes, pydantic validates. Only `build` and the layers above it import this."""

from pycls_fast.config.checks import Purpose
from pycls_fast.config.command_line import NoOptions, command_line
from pycls_fast.config.compose import load_config
from pycls_fast.config.options_line import options_line
from pycls_fast.config.reporting import cleanup_at_signals
from pycls_fast.config.saved import validate_saved
from pycls_fast.config.schema import RunConfig, Section
from pycls_fast.config.variants import command_alone, is_command, variant
from pycls_fast.values import ModuleNames

__all__ = [
    "ModuleNames",
    "NoOptions",
    "Purpose",
    "RunConfig",
    "Section",
    "cleanup_at_signals",
    "command_alone",
    "command_line",
    "is_command",
    "load_config",
    "options_line",
    "validate_saved",
    "variant",
]
