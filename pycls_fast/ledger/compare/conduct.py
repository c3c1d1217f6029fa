"""Compare two run folders: writes `compare.json`, a page and contact sheets, prints a table."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from pycls_fast.data import DamagedImage, decode
from pycls_fast.errors import UserError
from pycls_fast.exit_status import DONE
from pycls_fast.inference.sheet import Cell, write_sheets
from pycls_fast.ledger.compare.images import compare_images, why_not_paired
from pycls_fast.ledger.compare.page import page
from pycls_fast.ledger.compare.runs import RunFiles, read_run_files
from pycls_fast.ledger.compare.settings import changes, differences, environment_differences
from pycls_fast.ledger.compare.table import nats, print_comparison
from pycls_fast.ledger.records import curve
from pycls_fast.paths import user_path
from pycls_fast.train.environment import environment_command, versions
from pycls_fast.train.output_file import write_json

Record = dict[str, Any]


def compare_runs(run_a: str, run_b: str, *, output: str | None, images: int) -> int:
    """Compare two runs, write and print the result; returns the exit status.

    Args:
        run_a, run_b: run folders, finished or not.
        output: a folder, created if it does not exist; None for `comparisons/A--B`, numbered if that holds other
            runs.
        images: how many to show of each kind of disagreement.

    Raises:
        UserError: a folder does not hold a run, or `output` cannot be written to.
    """
    a, b = read_run_files(run_a), read_run_files(run_b)
    folder = user_path(output) if output else _default_folder(a.path, b.path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: {folder} cannot be created ({error.strerror}); give another") from error
    record = comparison(a, b, images)
    try:
        _write(folder, record, _pictures(a, b, record))
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written to ({error.strerror}); give another") from error
    print_comparison(record)
    print(f"page: {folder / 'index.html'}")
    return DONE


def _write(folder: Path, record: Record, pictures: Mapping[int, Image.Image]) -> None:
    write_json(folder / "compare.json", record)
    for kind, name in (("only_a", "a_right_b_wrong"), ("only_b", "b_right_a_wrong")):
        for old in folder.glob(f"{name}*.png"):
            old.unlink()
        cells = [_cell(each, pictures[each["index"]]) for each in _shown(record, kind) if each["index"] in pictures]
        if cells:
            write_sheets(cells, folder / f"{name}.png")
    (folder / "index.html").write_text(page(record, pictures), encoding="utf-8", errors="backslashreplace")


def comparison(a: RunFiles, b: RunFiles, images: int) -> Record:
    """The whole record; if `images` (the comparison image by image) is None, `not_paired` says why."""
    reason = why_not_paired(a, b)
    return {
        "kind": "comparison",
        "format": 1,
        "time": time.time(),
        "command": environment_command(),
        "versions": versions(),
        "a": _run(a),
        "b": _run(b),
        "settings": differences(a.config, b.config),
        "environment": environment_differences(a.environment, b.environment),
        "not_paired": reason,
        "without_pictures": (a.missing if a.source is None else None) and b.missing,
        "images": None if reason is not None else compare_images(a, b, images),
    }


def _run(run: RunFiles) -> Record:
    """What is known about one run; numbers that it does not have yet are None."""
    train = [r for r in run.records if r["kind"] == "train"]
    evaluations = run.evaluations if any(r["kind"] == "eval" for r in run.records) else []
    last: Mapping[str, Any] = evaluations[-1] if evaluations else {}
    summary = run.summary or {}
    newest: Mapping[str, Any] = train[-1] if train else {}
    return {
        "path": str(run.path),
        "config_name": run.config.get("config_name"),
        "environment": dict(run.environment),
        "finished": run.summary is not None,
        "steps": summary.get("steps", newest.get("step")),
        "epochs": summary.get("epochs", newest.get("epoch")),
        "weights": last.get("weights"),
        **{key: last.get(key) for key in ("top1", "top5", "loss", "count")},
        "best_top1": max((r["top1"] for r in evaluations), default=None),
        **{key: summary.get(key, newest.get(key)) for key in ("images_per_second", "memory_peak_bytes")},
        "step_seconds_p50": summary.get("step_seconds_p50"),
        **{
            k: summary.get(k) for k in ("wall_seconds", "parameters", "forward_flops_per_image", "world_size", "device")
        },
        "changes": changes(run.records),
        "curve": curve(train),
        "evaluations": [{key: r[key] for key in ("epoch", "top1", "loss")} for r in evaluations],
    }


def _default_folder(a: Path, b: Path) -> Path:
    """The first of `A--B`, `A--B_2`, ... that does not hold a comparison of other runs, whose names may be the same."""
    name = f"{_short(a)}--{_short(b)}"
    folders = (Path("comparisons") / (name + (f"_{n}" if n > 1 else "")) for n in itertools.count(1))
    return next(folder for folder in folders if _compared(folder) in (None, [a.resolve(), b.resolve()]))


def _compared(folder: Path) -> list[Path] | None:
    """The two runs whose comparison the folder holds; None if it holds none."""
    try:
        record = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
        return [Path(record[name]["path"]).resolve() for name in ("a", "b")]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        # Damaged, or written by another program.
        return []


def _short(path: Path) -> str:
    """A name made of the end of a path: the experiment and the time, or the folder's own name."""
    whole = path.resolve().parts
    if whole[-1].startswith("seed_"):
        # A run of a ledger: LEDGER/runs/RUNG/seed_N.
        return "_".join((*whole[-4:-3], *whole[-2:]))
    parts = whole[-2:]
    return "_".join(parts) if len(parts) == 2 and parts[1][:1].isdigit() else parts[-1]


def _shown(record: Record, kind: str) -> Sequence[Record]:
    return record["images"][kind] if record["images"] is not None else ()


def _pictures(a: RunFiles, b: RunFiles, record: Record) -> dict[int, Image.Image]:
    """The images of the disagreements by index, as far as they can still be read."""
    found: dict[int, Image.Image] = {}
    run = a if a.source is not None else b
    if run.source is None:
        return found
    upright = run.config["data"]["exif_orientation"]
    for each in (*_shown(record, "only_a"), *_shown(record, "only_b")):
        try:
            picture = decode(run.source.read(each["index"])[0], upright=upright)
        except (OSError, DamagedImage):
            continue
        # No larger than it is shown.
        picture.thumbnail((400, 400))
        found[each["index"]] = picture
    return found


def _cell(each: Record, picture: Image.Image) -> Cell:
    return Cell(
        picture, each["class"], [f"A: {each['a']} ({nats(each['loss_a'])})", f"B: {each['b']} ({nats(each['loss_b'])})"]
    )
