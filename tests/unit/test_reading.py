"""Files that anybody may have written are data: ordinary files, plain values, the expected types."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pycls_fast.config.of_weights import SavedConfig
from pycls_fast.config.saved import register
from pycls_fast.errors import UserError, printable
from pycls_fast.reading import cell, parse_json, parse_record, read_bytes, read_yaml


def test_only_ordinary_files_of_a_sane_size_are_read(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(file, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4"):
        read_bytes(file, 4)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="no ordinary file"):
            read_bytes(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "a: &a [1, 1]\nb: [*a, *a]", "a: !!python/name:os.system ''"])
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
    with pytest.raises(UserError, match=r"(data\.root|a|hydra|defaults).*: is resolved by nobody"):
        register(SavedConfig(values, tmp_path / "config.yaml"), [])


def test_no_address_is_contacted_that_only_a_saved_configuration_names(tmp_path: Path) -> None:
    for data in ({"root": "ftp://127.0.0.1/x"}, {"source": "digits", "root": str(tmp_path / "new")}):
        saved = SavedConfig({"data": data}, tmp_path / "config.yaml")
        with pytest.raises(UserError, match=r"^data\.root: .* names it; to allow it, give data\.root"):
            register(saved, [])
        register(saved, ["data.root=ftp://127.0.0.1/x"])


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "train", "step": 2, "lo',
        '{"kind": "train", "epoch": 1, "loss": 1, "images_per_second": 1}',
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
