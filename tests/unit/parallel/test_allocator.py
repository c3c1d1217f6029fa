"""Freed memory that the process keeps: told by page faults, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pycls_fast.speed import HAS_GLIBC

pytestmark = pytest.mark.skipif(not HAS_GLIBC, reason="malloc of another C library")

# Activations of a step: many at a time, then none. Prints the page faults of each way's ninth step.
SCRIPT = """
import resource, sys
import torch
from pycls_fast.parallel import keep_freed_memory

def step():
    kept = [torch.ones(10 << 20) for _ in range(3)]
    return sum(float(tensor[-1]) for tensor in kept)

def faults():
    # The heap takes some steps to have found room for all.
    for _ in range(8):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert step() == 3
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for word in sys.argv[1:]:
    keep_freed_memory(word == "keep")
    print(faults())
"""


def page_faults(*words: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=True, timeout=120
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.slow
def test_a_step_gets_the_pages_of_the_step_before_it() -> None:
    # 3 tensors of 40 MiB are 30,720 pages of 4 KiB.
    default, kept, again = page_faults("default", "keep", "keep")
    assert kept < 1000
    assert again < 1000
    assert default > 5000
