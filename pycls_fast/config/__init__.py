"""Configuration: Hydra composes, pydantic decides. Nothing below `build`, `train`, `ledger` and `tools` imports this."""

from pycls_fast.config.command_line import command_line
from pycls_fast.config.compose import load_config, load_run_config
from pycls_fast.config.schema import RunConfig, Section

__all__ = ["RunConfig", "Section", "command_line", "load_config", "load_run_config"]
