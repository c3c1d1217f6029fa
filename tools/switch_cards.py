"""Write `docs/switches.md`, one card per performance switch, from the catalogue: `python tools/switch_cards.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pycls_fast.config import NoOptions, options_line
from pycls_fast.speed import CATALOGUE, Device, Switch

PAGE = Path(__file__).parents[1] / "docs" / "switches.md"

_HEAD = """\
# Performance switches

Made by `python tools/switch_cards.py` from `pycls_fast/speed/`; change it there.

`speed=reference` sets every switch to its first value, the plain twin; `speed=fast` to the best one known for the
device (and for a precision with products in 16 bits); `speed.NAME=VALUE` sets one by hand. A value that the device
cannot run is an error that names another. What a value owes its reference: `identical`, the same bits; `rounding`, the
same mathematics in another order; `training`, it changes what is learned, and its accuracy has to be measured.
"""


def page(switches: Sequence[Switch]) -> str:
    """The whole page: a table of all switches, then a card for each."""
    return "\n".join([_HEAD, *_table(switches), "", *(line for switch in switches for line in _card(switch))])


def _table(switches: Sequence[Switch]) -> Iterator[str]:
    yield "| switch | values, the reference first | fast on CPU | fast on CUDA | owes | models |"
    yield "|---|---|---|---|---|---|"
    for switch in switches:
        values, models = ", ".join(switch.values), ", ".join(switch.applies_to)
        yield (
            f"| [{switch.name}](#{switch.name}) | {values} | {_fast(switch, 'cpu')} | {_fast(switch, 'cuda')} | "
            f"{switch.numerics} | {models} |"
        )


def _fast(switch: Switch, device: Device) -> str:
    other = switch.fast_16_bits.get(device)
    return switch.fast[device] + (f" (16 bits: {other})" if other is not None else "")


def _card(switch: Switch) -> Iterator[str]:
    yield f"## {switch.name}"
    yield ""
    yield f"`{' | '.join(switch.values)}`"
    yield ""
    yield switch.note
    yield ""
    if switch.requires:
        needs = ", ".join(f"{value} needs {device.upper()}" for value, device in switch.requires.items())
        yield f"- Machine: {needs}."
    yield f"- Mathematics ({switch.numerics}): {switch.mathematics}"
    yield f"- Helps: {switch.helps}"
    yield f"- Hurts: {switch.hurts}"
    yield f"- Source: {switch.source}"
    yield f"- Ran: {switch.ran}"
    yield ""


def main(options: NoOptions) -> int:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(CATALOGUE), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    options_line(main, NoOptions)
