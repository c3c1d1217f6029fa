"""What the pages of several scripts here begin with."""

from __future__ import annotations

import datetime
import platform

import torch

from pycls_fast.train.environment import environment


def provenance_lines(device: torch.device, command: str | None = None) -> list[str]:
    """What a page of measurements begins with: command (None: that of this process), hardware, versions, date."""
    found = environment(device, 1, command)
    threads = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"
    accelerator = "" if device.type == "cpu" else f", {found['device']}"
    return [
        f"- Command: `{found['command']}`",
        f"- Hardware: {found['processor']}, {found['cpu_count']} cores, {threads}{accelerator}, {platform.system()}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in found['versions'].items())}",
        f"- Date: {datetime.datetime.now(tz=datetime.UTC).date()}",
    ]
