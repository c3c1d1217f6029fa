"""Damage: bytes that a disk or a network changes, and values that a hostile writer chooses."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import numpy as np

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1e308, 2**63, 10**30, "", "x", "=1+1", "\x1b[31m", "${oc.env:SECRET}", "../../x", "\0"),
    *([], {}, [[]], {"a": []}, ["x"], "9" * 5000, "/dev/zero", "ftp://127.0.0.1:9/x", "\ud800"),
)
"""What a field may hold instead of what it should."""


def damaged(draw: random.Random, data: bytes) -> bytes:
    """A copy with one to three changes: bits, cuts, repeats, noise, large numbers."""
    for _ in range(draw.randint(1, 3)):
        start = draw.randint(0, len(data))
        end = min(len(data), start + draw.choice((1, 4, 8, 64, 4096)))
        part = data[start:end]
        middle = draw.choice(
            (
                b"",
                part + part,
                draw.randbytes(len(part)),
                bytes(len(part)),
                b"\xff" * len(part),
                bytes(byte ^ (1 << draw.randrange(8)) for byte in part),
            )
        )
        data = data[:start] + middle + (data[end:] if draw.random() < 0.9 else b"")
    return data


def odd_json(draw: random.Random, text: str) -> str:
    """The same JSON with one value replaced or left out."""
    values = json.loads(text)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(values)
    if not places or draw.random() < 0.02:
        return draw.choice(("[" * 100_000, '{"a":' * 50_000, json.dumps(draw.choice(VALUES))))
    node, key = draw.choice(places)
    if isinstance(node, dict) and draw.random() < 0.3:
        del node[key]
    else:
        node[key] = draw.choice(VALUES)
    return json.dumps(values)


def odd_npz(draw: random.Random, data: bytes) -> bytes:
    """The same arrays, one of another type, shape or length; or, of an index, with an odd value in its description."""
    with np.load(io.BytesIO(data)) as stored:
        arrays = dict(stored)
    name = draw.choice(sorted(arrays))
    array = arrays[name]
    if name == "about":
        arrays[name] = np.frombuffer(odd_json(draw, array.tobytes().decode()).encode(errors="surrogatepass"), np.uint8)
    else:
        new_axis, shorter, repeated = array[None], array[:-1] if array.ndim else array, np.repeat(array, 2)
        # Wide enough for the values that follow.
        wide = array.astype(np.result_type(array, np.int64)) if array.dtype.kind in "biuf" else np.arange(array.size)
        others = (np.full(array.shape, "text"), wide.astype(np.complex64), wide * 0 - 1, wide[..., None] * 1000)
        arrays[name] = draw.choice((new_axis, shorter, repeated, *others))
    np.savez(written := io.BytesIO(), **arrays)
    return written.getvalue()


def mutant(draw: random.Random, name: str, data: bytes) -> bytes:
    """A damaged file: if it holds JSON, as often with an odd value."""
    if draw.random() < 0.5:
        return damaged(draw, data)
    if name.endswith((".json", ".jsonl")):
        lines = data.decode().splitlines() if name.endswith(".jsonl") else [data.decode()]
        number = draw.randrange(len(lines))
        lines[number] = odd_json(draw, lines[number])
        return "\n".join(lines).encode(errors="surrogatepass")
    if name.endswith(".safetensors"):
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        about = header.get("__metadata__", {})
        if "config" in about and draw.random() < 0.6:
            about["config"] = odd_json(draw, about["config"])
            text = json.dumps(header)
        else:
            text = odd_json(draw, json.dumps(header))
        encoded = text.encode(errors="surrogatepass")
        return len(encoded).to_bytes(8, "little") + encoded + data[8 + length :]
    if name.endswith(".npz"):
        return odd_npz(draw, data)
    if name.endswith(".yaml"):
        lines = data.decode().splitlines()
        number = draw.randrange(1, len(lines))
        key, colon, _ = lines[number].partition(":")
        if colon:
            lines[number] = f"{key}: {json.dumps(draw.choice(VALUES))}"
        return "\n".join(lines).encode()
    return damaged(draw, data)
