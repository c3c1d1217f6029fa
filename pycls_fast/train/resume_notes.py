"""How a run that was stopped is resumed, for its user."""

from __future__ import annotations

import os
import shlex
import sys

from pycls_fast.config import command_alone, is_command, scheduler
from pycls_fast.train.environment import environment_command, program_words
from pycls_fast.train.run import Run


def resume_notes(run: Run) -> list[str]:
    """The command that resumes the run, and what it leaves out."""
    notes = [f"resume with: {_command(run)}"]
    if command_alone() is not None:
        notes.append("that resumes only this run of the sweep; restart the other unfinished runs, too")
    return notes


def _command(run: Run) -> str:
    if not is_command():
        return f"the same configuration, run_dir={run.folder.path} and resume=auto"
    # As typed: outside of an activated environment, `python` is another one or none.
    interpreter, alone = sys.orig_argv[0], command_alone()
    command = environment_command(interpreter)
    if alone is not None:
        # Only this run of a sweep: the whole sweep would start again, or be refused because of the folder.
        command = shlex.join([interpreter, *program_words(), *alone])
    if run.config.run_dir is None or alone is not None:
        command += f" {shlex.quote(f'run_dir={run.folder.path}')}"
    if run.config.resume != "auto":
        # With any other value it would start from where this run first started, or refuse the folder.
        command += " resume=auto"
    if run.world.size > 1 and not scheduler.is_task():
        nodes = max(1, run.world.size // int(os.environ.get("LOCAL_WORLD_SIZE", run.world.size)))
        each = run.world.size // nodes
        launcher = f"torchrun --nproc_per_node {each}" + (
            f" --nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint HOST:PORT" if nodes > 1 else ""
        )
        command = command.replace(f"{shlex.join([interpreter, '-u'])} ", f"{launcher} ", 1)
    return command
