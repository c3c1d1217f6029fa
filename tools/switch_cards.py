"""Write `docs/switches.md`, a card for each switch, precision level and strategy: `python tools/switch_cards.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pycls_fast.config import NoOptions, command_line
from pycls_fast.precision import KEPT_IN_FLOAT32, LEVELS, Level
from pycls_fast.speed import CATALOGUE, Device, Switch
from pycls_fast.strategies import STRATEGIES, Strategy

PAGE = Path(__file__).parents[1] / "docs" / "switches.md"

_HEAD = """\
# Performance switches

Made by `python tools/switch_cards.py` from `pycls_fast/speed/`, `pycls_fast/precision.py` and
`pycls_fast/strategies.py`; change it there. After the switches: [precision levels](#precision-levels) and
[strategies](#strategies).

`speed=reference` sets every switch to its first value, the plain implementation; `speed=fast` to the best known one for
the device (and for a precision with products in 16 bits; with `precision=fp8`, `qkv` is `separate` and on CUDA
`compile` is `blocks`); `speed.NAME=VALUE` sets one by hand. A value that the device cannot run is an error that names
another. How closely a value must match its reference: `identical`, the same bits; `rounding`, the same mathematics in a
different order; `training`, it changes what is learned, so its accuracy has to be measured.
`python tools/ledger.py ladder=switches switches=[NAME]` measures one against its reference.
"""

_PRECISION = """\
# Precision levels

`precision=NAME`: the formats of a step. `fp32` is the reference; every other level is of the class `training`, since
more rounding changes what is learned (`ladder=apex` of the ledger). At every level the loss is computed in float32, the
optimizer's arithmetic and AdamW's state are float32, and checkpoints hold float32 weights.
"""

_STRATEGIES = """\
# Strategies

`parallel=NAME`: how ranks share the work; `parallel=auto` is `ddp` under torchrun with several ranks, else `single`.
"""


def page(switches: Sequence[Switch], levels: Sequence[Level], strategies: Sequence[Strategy]) -> str:
    """The whole page: a table of all switches, then a card for each; levels and strategies likewise."""
    parts = [
        [_HEAD, *_table(switches), ""],
        *map(_card, switches),
        [_PRECISION, *_level_table(levels), ""],
        *map(_level_card, levels),
        [_STRATEGIES, *_strategy_table(strategies), ""],
        *map(_strategy_card, strategies),
    ]
    return "\n".join(line for part in parts for line in part)


def _table(switches: Sequence[Switch]) -> Iterator[str]:
    yield "| switch | values, the reference first | fast on CPU | fast on CUDA | numerics | models |"
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
    yield from _end(switch)


def _level_table(levels: Sequence[Level]) -> Iterator[str]:
    yield "| level | Apex | products | network's weights | float32 weights of the optimizer | loss scaling |"
    yield "|---|---|---|---|---|---|"
    for level in levels:
        yield (
            f"| [{level.name}](#{level.name}) | {level.apex} | {_products(level)} | {level.weights} | "
            f"{_wide_weights(level)} | {'yes' if level.scaled else ''} |"
        )


def _products(level: Level) -> str:
    if level.float8:
        return f"float8 in linear layers, else {level.compute}"
    return "TF32" if level.tf32 else level.compute


def _wide_weights(level: Level) -> str:
    if level.weights == "float32":
        return "the network's"
    return "masters" if level.masters == "kept" else "none"


def _stays(level: Level) -> str:
    """Everything that stays float32 at a level whose products do not."""
    found = []
    if level.autocast is not None:
        found.append(f"under autocast {', '.join(f'`{name}`' for name in KEPT_IN_FLOAT32)}")
    if level.wide_norms:
        found.append("every norm")
    elif level.weights != "float32" and level.masters == "kept":
        found.append("batch norm, with its statistics")
    if level.weights == "float32":
        found.append("weights, their gradients and batch norm's statistics")
    return "; ".join(found) or "nothing of the network"


def _level_card(level: Level) -> Iterator[str]:
    yield f"## {level.name}"
    yield ""
    yield level.note
    yield ""
    other = " with the other half format" if level.compute == "bfloat16" else ""
    names = [f"Apex's {level.apex}{other}"] if level.apex else []
    names += [level.elsewhere] if level.elsewhere else []
    if names:
        yield f"- Elsewhere: {'; '.join(names)}."
    yield f"- Mathematics ({'the reference' if level.name == 'fp32' else 'training'}): {_rounding(level)}"
    yield f"- Stays in float32: {_stays(level)}."
    yield from _end(level)


def _rounding(level: Level) -> str:
    """What is rounded to fewer bits than float32 has."""
    if level.tf32:
        return "The factors of products are rounded to TF32."
    if level.compute == "float32":
        return "Nothing is rounded to fewer bits than float32 has."
    if level.float8:
        return "Linear layers multiply factors rounded to float8; other products are as in amp_bf16."
    if level.autocast is not None:
        return (
            f"Products round their factors and results to {level.autocast}; operations between them that are not "
            "listed below are computed in the format of their input."
        )
    lost = (
        "the optimizer changes float32 masters, which are rounded into the network after each step"
        if level.masters == "kept"
        else "an update is computed in float32 from the rounded weight, and rounded at once"
    )
    return f"Weights, activations and gradients are {level.weights}; {lost}."


def _strategy_table(strategies: Sequence[Strategy]) -> Iterator[str]:
    yield "| strategy | a rank holds |"
    yield "|---|---|"
    for strategy in strategies:
        yield f"| [{strategy.name}](#{strategy.name}) | {strategy.holds} |"


def _strategy_card(strategy: Strategy) -> Iterator[str]:
    yield f"## {strategy.name}"
    yield ""
    yield strategy.note
    yield ""
    yield f"- A rank holds: {strategy.holds}"
    yield f"- Mathematics ({strategy.numerics}): {strategy.mathematics}"
    yield from _end(strategy)


def _end(card: Switch | Level | Strategy) -> Iterator[str]:
    yield f"- Helps: {card.helps}"
    yield f"- Hurts: {card.hurts}"
    yield f"- Source: {card.source}"
    yield f"- Ran: {card.ran}"
    yield ""


def main(options: NoOptions) -> int:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(CATALOGUE, tuple(LEVELS.values()), tuple(STRATEGIES.values())), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    command_line(main, default=None, about=__doc__)
