"""The same from outside: real processes end with status 2, one line per mistake, no traceback, nothing on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import ROOT, run_process

NO_WEIGHTS = (
    "weights: not set; give a run, a file, timm:NAME, torchvision:NAME or hf:ORG/NAME as weights=SOURCE, "
    "or an experiment that begins without any (--config-name resnet18) (configs/finetune.yaml or the command line)"
)
LEDGER = (
    "the command is pycls-fast ledger --config-name EXPERIMENT [ladder=NAME] [key=value ...], for example "
    "pycls-fast ledger --config-name vit_digits ladder=modern"
)


def process(file: Path, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_process([sys.executable, str(file), *arguments], cwd=cwd, expect=None, **variables)


def tool(name: str, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return process(ROOT / "tools" / f"{name}.py", *arguments, cwd=cwd, **variables)


def own_tool(folder: Path, body: str, first: str = "") -> Path:
    """A tool's file: `body` are the lines of its function, `first` come before it."""
    script = folder / "tool.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    script.write_text(
        f"import os, signal, sys\n{first}\nfrom pycls_fast.config import Verb, command_line\n"
        "from pycls_fast.errors import Finished\n"
        f"class Own(Verb):\n  def __call__(self, config):\n{lines}command_line(Own)\n"
    )
    return script


@pytest.mark.parametrize(
    ("name", "arguments", "lines"),
    [
        (
            "train_net",
            ["--config-name", "vit_digits", "optim.lr=-1", "optim.ema_decay=0", "sped.clip=loop"],
            [
                "optim.lr: must be greater than 0; got -1 (the command line)",
                "optim.ema_decay: must be greater than 0, or null; got 0 (the command line)",
                "sped: unknown key; did you mean speed? (the command line)",
            ],
        ),
        ("ledger", ["--config-name", "finetune", "data.root=."], [NO_WEIGHTS, LEDGER]),
        ("predict", ["x", "a.jpg", "topk=0"], ["topk: must be greater than 0; got 0 (the command line)"]),
    ],
)
def test_a_mistake_ends_the_process_with_status_2(
    tmp_path: Path, name: str, arguments: list[str], lines: list[str]
) -> None:
    done = tool(name, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [f"error: {line}" for line in lines]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [("return 3", 3, ""), ("raise KeyboardInterrupt", 130, "interrupted: Ctrl-C ended this at once\n")],
)
def test_a_signal_ends_the_whole_sweep(tmp_path: Path, ends: str, status: int, said: str) -> None:
    """A run that a signal has stopped returns 3; the runs after it are not started."""
    script = own_tool(tmp_path, f"print('seed', config.seed)\nif config.seed == 0: return 0\n{ends}")
    done = process(script, "--multirun", "seed=0,1,2", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (status, "seed 0\nseed 1\n", said)


@pytest.mark.slow
def test_a_crash_in_a_sweep_is_shown_at_once(tmp_path: Path) -> None:
    """The runs after it are started; the status is that of the crash, whatever theirs."""
    body = "print('seed', config.seed, file=sys.stderr)\nif config.seed == 0: raise ValueError('broken')\nreturn 2"
    done = process(own_tool(tmp_path, body), "--multirun", "seed=0,1", cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert (lines[0], lines[1][:9], lines[-2:]) == ("seed 0", "Traceback", ["ValueError: broken", "seed 1"])


def test_ctrl_c_while_a_tool_is_importing(tmp_path: Path) -> None:
    """Also if the import swallows exceptions, and after the terminal is gone."""
    swallows = "import os, signal\n{}\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept: pass\n"
    for before, said in (("", "interrupted: Ctrl-C ended this at once\n"), ("os.close(2)", "")):
        (tmp_path / "pydantic.py").write_text(swallows.format(before))
        done = tool("train_net", cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIG_IGN", 3)])
def test_ctrl_c_after_the_imports_runs_the_cleanup(tmp_path: Path, number: str, status: int) -> None:
    """Ctrl-C during an import in the tool, such as torch's, ends it at once; an ignored signal stays ignored."""
    (tmp_path / "slow.py").write_text("import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept: pass\n")
    script = own_tool(
        tmp_path,
        "try:\n  if config.seed: import slow\n  else: os.kill(os.getpid(), signal.SIGINT)\n"
        "finally: print('cleaned up', flush=True)\nreturn 3",
        f"if {number == 'SIG_IGN'}: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from pycls_fast.errors import end_imports_at_ctrl_c\nend_imports_at_ctrl_c()",
    )
    said = "interrupted: Ctrl-C ended this at once\n" if status == 130 else ""
    for seed, printed in ((0, "cleaned up\n"), (1, "" if status == 130 else "cleaned up\n")):
        done = process(script, f"seed={seed}", cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert (done.returncode, done.stdout, done.stderr) == (status, printed, said)


@pytest.mark.slow
@pytest.mark.parametrize(("prints", "returns"), [("print('x' * 10**6)", 0), ("print('x')", 1), ("", 0)])
def test_a_reader_that_is_gone_is_not_an_error(tmp_path: Path, prints: str, returns: int) -> None:
    script = own_tool(tmp_path, f"{prints}\nreturn 1") if prints else "-m pycls_fast"  # the list of verbs
    # The reader is gone before the tool prints.
    line = f"set -o pipefail; {{ sleep 0.2; exec {sys.executable} {script}; }} | :"
    done = run_process(["bash", "-c", line], cwd=tmp_path, expect=returns, PYTHONUNBUFFERED="")
    assert done.stderr == ""


SWEEPER = """
import json
from pathlib import Path
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class Fake(Sweeper):
    def setup(self, **parts):
        self.folder = Path(parts["config"].hydra.sweep.dir)
        self.launcher = Plugins.instance().instantiate_launcher(**parts)

    def sweep(self, arguments):
        runs = self.launcher.launch([[*arguments, f"++seed={seed}"] for seed in (1, 2, 3)], initial_job_idx=0)
        (self.folder / "found.json").write_text(json.dumps([run.return_value for run in runs]))

ConfigStore.instance().store(group="hydra/sweeper", name="fake", node={"_target_": "hydra_plugins.fake.Fake"})
"""


@pytest.mark.slow
def test_a_sweeper_that_optimizes_gets_the_objective(tmp_path: Path) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "fake.py").write_text(SWEEPER)
    script = own_tool(tmp_path, "return Finished(config.seed / 2) if config.seed < 3 else 2")
    done = process(script, "--multirun", "hydra/sweeper=fake", cwd=tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 2, done.stderr
    (file,) = tmp_path.glob("multirun/fake-*/found.json")
    assert done.stderr == f"note: the result of fake will be in {file.parent.relative_to(tmp_path)}\n"
    assert file.read_text() == "[0.5, 1.0, null]"


@pytest.mark.parametrize("override", ["seed=-1", "speed={compile: off, gelu: polynomial}", "weights=gone.safetensors"])
def test_the_configuration_is_checked_before_torch_is_imported(tmp_path: Path, override: str) -> None:
    """A mistake is told in half a second, not after the seconds that torch takes."""
    code = (
        "import sys, pycls_fast.cli\n"
        f"sys.argv = ['tool', '{override}']\n"
        "try: pycls_fast.cli.main('train')\n"
        "finally: print('torch' in sys.modules)"
    )
    (tmp_path / "tool.py").write_text(code)
    done = process(tmp_path / "tool.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "False\n")
