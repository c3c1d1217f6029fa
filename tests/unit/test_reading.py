"""Files that anybody may have written are data: ordinary files, plain values, the expected types. Paths with a tilde,
and users without a home.
"""

from __future__ import annotations

import json
import os
import pwd
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pycls_fast.config import load_config, validate_saved
from pycls_fast.config.compose import long_name
from pycls_fast.config.reuse import as_data, register
from pycls_fast.config.saved import SavedConfig, saved_at
from pycls_fast.data import native
from pycls_fast.data.sources import arrays, folders, remote, tables, tars
from pycls_fast.data.sources.files import OpenFiles
from pycls_fast.data.sources.index import _places
from pycls_fast.errors import UserError, cell, printable, reporting
from pycls_fast.files import cache_folder, user_path
from pycls_fast.ledger.report.record import read_record
from pycls_fast.models.pretrained import description_of, read_weights
from pycls_fast.reading import parse_json, parse_record, read_bytes, read_npz, read_yaml


def test_only_ordinary_files_of_a_sane_size_are_read(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(file, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4"):
        read_bytes(file, 4)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="no ordinary file"):
            read_bytes(path)


_DEEP = 60 * "[" + 60 * "]"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, "{", "a: &a [1, 1]\nb: [*a, *a]", "a: !!python/name:os.system ''", _DEEP, "a: !!set {b}",
        "null: 1",
    ],
)  # fmt: skip
def test_hostile_text_is_one_error(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "config.yaml").write_text(text[:20_000])
    with pytest.raises(ValueError, match=r"^.+$"):
        read_yaml(file)
    with pytest.raises(ValueError, match=r"^.+$"):
        parse_json(text)


@pytest.mark.parametrize(
    "values",
    [{"data": {"root": "ftp://${oc.env:TOKEN}@host"}}, {"a": [{"${b}": 1}]}, {"hydra": {}}, {"defaults": ["base"]}],
)
def test_nothing_in_a_saved_configuration_is_resolved(tmp_path: Path, values: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"config\.yaml: .* are not for saved configurations"):
        register(SavedConfig(values, tmp_path / "config.yaml"), [])


@pytest.mark.parametrize(
    "data",
    [
        {"root": "ftp://127.0.0.1/x"},
        {"source": "digits", "root": "/nowhere/new"},
        {"source": "digits", "root": "new"},
        {"source": "hub", "root": "org/name"},
    ],
)
def test_no_place_counts_that_only_a_saved_configuration_names(tmp_path: Path, data: dict[str, str]) -> None:
    saved = SavedConfig({"data": {**data, "index_cache": "here", "shard_cache": "there"}}, tmp_path / "config.yaml")
    # A dictionary without it is merged into the saved one.
    for typed in ([], ["data={image_size: 32}"], ["+data={image_size: 32}"]):
        with pytest.raises(UserError, match=r"^data\.root: .* names it; to allow it, give data\.root"):
            register(saved, typed)
    for allows in ("data.root=ftp://127.0.0.1/x", "data={root: here}", "data=synthetic"):
        register(saved, [allows])
    assert as_data(saved, {"data.root": "x"})["data"] == data


def test_no_module_is_imported_that_only_a_saved_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger.py").write_text("raise SystemExit('code ran')")
    monkeypatch.chdir(tmp_path)
    values = load_config().model_dump(mode="json") | {"imports": ["stranger", "json"], "model": {"kind": "odd"}}
    line = r"imports: .*config.yaml names stranger, which .* add imports=\[stranger\]"
    with pytest.raises(UserError, match=f"^{line}"):
        register(SavedConfig(values, tmp_path / "config.yaml"), [])
    with pytest.raises(UserError, match=rf"^model\.kind: .*\n{line}"):
        validate_saved(values, "config.yaml")


def test_no_file_is_opened_that_an_option_of_a_timm_model_names() -> None:
    values = load_config("vit_digits", ["model=timm", "model.name=resnet18"]).model_dump(mode="json")
    values["model"]["options"] = {"checkpoint_path": "stranger.pth"}
    with pytest.raises(UserError, match=r"^model\.options: checkpoint_path: weights=timm:NAME brings weights"):
        validate_saved(values, "config.yaml")


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "train", "step": 2, "lo',
        '{"kind": "train", "step": 1, "epoch": 1, "loss": 1, "lr": 1, "images_per_second": 1, "memory_peak_bytes": 1}',
        '{"kind": "event", "step": 1, "epoch": 1, "event": "resumed", "asked": "x"}',
        '{"kind": "eval", "step": 1, "epoch": 1, "weights": "ema", "count": 1, "loss": 1, "top1": 1}',
        '{"kind": ["train"], "step": 1, "epoch": 1}',
        '{"kind": "event", "step": 1, "epoch": 1, "event": "damaged image"}',
        "[" * 100_000,
        "[]",
    ],
)
def test_a_damaged_record_is_left_out(line: str) -> None:
    assert parse_record(line) is None


def test_names_command_neither_terminals_nor_spreadsheets() -> None:
    assert printable("evil\x1b[31m\x9b2J\u202e\tname\n") == "evil\\x1b[31m\\x9b2J\\u202e\tname\n"
    assert [cell(value) for value in ("=1+1", " @x", "-", "-1e-3", "name", -1)] == [
        "'=1+1", "' @x", "-", "-1e-3", "name", -1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "read",
    [
        tables._read_csv,
        tables._read_parquet,
        lambda path: tars._scan(str(path), "cls"),
        arrays._read,
        read_npz,
        folders._read_kaggle,
        folders._unpack,
        lambda path: OpenFiles().read(str(path), 0, 1),
        lambda path: remote.read_range(f"file://{path}", 0, 1),
        lambda path: read_weights(str(path.rename(path.with_suffix(".pth")))),
        read_record,
    ],
)
def test_no_reader_waits_for_a_pipe(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((OSError, UserError), match=r"no ordinary file|is not a file"):
        read(tmp_path / "pipe")


def test_a_file_that_unpacks_to_far_more_is_not_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "zeros.npz", zeros=np.zeros(10_000_000))
    with pytest.raises(ValueError, match="would unpack to 80,000,1"):
        read_npz(tmp_path / "zeros.npz")
    torch.save({"zeros": torch.zeros(10_000_000)}, tmp_path / "stored.pth")
    with zipfile.ZipFile(tmp_path / "stored.pth") as stored, zipfile.ZipFile(tmp_path / "zeros.pth", "w", 8) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    with pytest.raises(UserError, match="would unpack to 40,00"):
        read_weights(str(tmp_path / "zeros.pth"))


def test_a_text_that_is_not_utf8_in_parquet_is_one_line(tmp_path: Path) -> None:
    parts = [None, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")]
    pq.write_table(pa.table({"path": pa.Array.from_buffers(pa.string(), 1, parts)}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"train.parquet: cannot be read \(.*utf-8"):
        tables._read_parquet(tmp_path / "train.parquet")


@pytest.mark.parametrize(
    "kept", [{"crop_pct": 1000}, {"crop_pct": 0}, {"input_size": [3, 0, 0]}, {"mean": "x"}, {"mean": [1e308, 0.0, 0.0]}]
)
def test_a_description_of_timm_that_makes_no_sense_is_one_line(tmp_path: Path, kept: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": kept}))
    with pytest.raises(UserError, match=r"^weights: .*config.json is not timm's description of a model \("):
        description_of(tmp_path / "model.safetensors")


def test_a_name_that_is_too_long_is_no_file_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * 300
    assert long_name(f"data={name}", []) == f"data={name}"
    assert saved_at(Path(name)) is None
    assert reporting(lambda: int(Path(name).is_file())) == 2
    assert capsys.readouterr().err == f"error: {name[:99]}...: File name too long\n"


def test_home_is_resolved_and_nobodys_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert user_path("~/images") == Path("/somewhere/images")
    assert user_path(Path("~/images")) == Path("/somewhere/images")
    assert user_path("~nobody_of_that_name/images") == Path("~nobody_of_that_name/images")


def test_a_cache_of_nobody_is_below_the_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`docker run --user 12345` without HOME."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert cache_folder() == Path(".cache/pycls_fast")
    assert _places("hub:x", "auto")[0].parent == cache_folder()
    monkeypatch.setenv("CC", "no-such-compiler")
    native.library.cache_clear()
    with pytest.raises(UserError, match="no-such-compiler"):
        native.library()
    cache_folder().mkdir(parents=True, exist_ok=True)
    native._path().touch()
    monkeypatch.setattr(os, "getuid", lambda: -2)
    with pytest.raises(UserError, match="belongs to another user, whose code is not run; remove it"):
        native.library()
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/pycls_fast")
