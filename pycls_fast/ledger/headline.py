"""What a ledger found, in a few sentences, and what it was measured on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pycls_fast.train.display import human

Record = Mapping[str, Any]

_LOSSES = ("loss", "small loss")


def title(record: Record) -> str:
    """The experiment, its model and the hardware."""
    found = record["model"] or {}
    sizes = [
        f"{found['model']}" if found.get("model") else "",
        human(found["parameters"]) + " parameters" if found.get("parameters") else "",
        f"{found['image_size']} pixels" if found.get("image_size") else "",
    ]
    what = ", ".join(filter(None, sizes))
    return f"{record['config_name']}{f' ({what})' if what else ''} on {hardware(record)}"


def hardware(record: Record) -> str:
    """The accelerators, or the processor and its cores."""
    device, environment = record["device"], record["environment"]
    if device not in (None, "cpu"):
        # Rungs that cannot run here say nothing of the hardware.
        most = max((arm["ranks"] for arm in record["arms"] if arm["timing"] or arm["training"]), default=1)
        return f"{f'up to {most} x ' if most > 1 else ''}{device}"
    return _processor(environment)


def machine(record: Record) -> str:
    """Processor, cores, memory of the host and device."""
    memory = record["environment"].get("memory_bytes")
    size = f", {memory / 1e9:.0f} GB of memory" if memory else ""
    return f"{_processor(record['environment'])}{size}, device {record['device'] or 'unknown'}"


def _processor(environment: Record) -> str:
    cores = environment.get("cpu_count")
    return (environment.get("processor") or "unknown processor") + (f", {cores} cores" if cores else "")


def origin(record: Record) -> str:
    """Date and git commit of the measurements."""
    when = "date unknown" if record["time"] is None else time.strftime("%Y-%m-%d", time.gmtime(record["time"]))
    git = record["environment"].get("git")
    if git is None:
        return f"{when}, commit unknown"
    return f"{when}, commit {git['commit'][:10]}{' with changes' if git['changed'] else ''}"


def unfinished(record: Record) -> str | None:
    """How much of the plan is done, if not all of it."""
    progress = record.get("unfinished")
    return progress and f"unfinished: {progress['done']} of {progress['of']} measurements"


def on_ranks(arm: Record, record: Record) -> str:
    """The number of an arm's ranks as " on N ranks" if the first arm has a different one, else ""."""
    ranks = arm["ranks"]
    return "" if ranks == record["arms"][0]["ranks"] else f" on {ranks} rank{'' if ranks == 1 else 's'}"


def headline(record: Record) -> list[str]:
    """The result in sentences: the fastest arm without a shown loss, then what each rung gains and costs."""
    ran = [arm for arm in record["arms"][1:] if arm["status"] == "measured"]
    others = [arm for arm in ran if arm["timing"] or arm["training"]]
    return [*_best(others, record), *_speeds(others, record), *_accuracies(others, record), *_not_run(record)]


def _best(arms: Sequence[Record], record: Record) -> list[str]:
    timed = [arm for arm in arms if arm["timing"] and arm["timing"]["speedup"]]
    quicker = [arm for arm in timed if _speed(arm, "speedup") == "faster"]
    good = [arm for arm in quicker if _accuracy(arm, "against_reference") not in ("loses", "ended")]
    if not timed:
        return []
    first = record["reference"]
    if not good:
        return [f"No rung is shown to be faster than '{first}'{' without a loss of top-1' if quicker else ''}."]
    best = max(good, key=lambda arm: arm["timing"]["speedup"]["ratio"])
    speedup = best["timing"]["speedup"]
    below = ", on top of the rungs before it" if _adds_up(record) else ""
    cost = _cost(best, record["settings"].get("margin"))
    return [
        f"{speedup['ratio']:.2f}x ({speedup['low']:.2f} to {speedup['high']:.2f}){on_ranks(best, record)} over "
        f"'{first}' with '{best['name']}'{below}; {cost}."
    ]


def _cost(arm: Record, margin: float | None) -> str:
    """What a verdict that is no loss says of the arm's accuracy."""
    kind = _accuracy(arm, "against_reference")
    if kind == "unknown":
        return "accuracy not measured"
    if kind == "open":
        return "no loss of top-1 shown, but too few runs to exclude one"
    finding = arm["training"]["against_reference"]["verdict"]["finding"]
    accepted = "the accepted one" if margin is None else f"{margin:g} points"
    return {"identical": "every prediction is the same", "gain": "top-1 gains"}.get(
        finding, f"no loss of top-1 larger than {accepted}"
    )


def _adds_up(record: Record) -> bool:
    """Whether each rung contains those before it, so that its own effect is the difference from the one before."""
    return bool(record["settings"]["mode"] == "cumulative")


def _speeds(arms: Sequence[Record], record: Record) -> list[str]:
    """What is faster, slower, or neither: over the rung before if rungs add up, else over the first."""
    speed_key, accuracy_key = ("speedup_before", "against_before") if _adds_up(record) else _AGAINST_FIRST
    groups: dict[str, list[str]] = {}
    for arm in arms:
        found = _speed(arm, speed_key)
        if found == "faster":
            found = {"loses": "faster at a loss", "ended": "faster, ended"}.get(_accuracy(arm, accuracy_key), found)
        speedup = arm["timing"] and arm["timing"][speed_key]
        ratio = f" ({speedup['ratio']:.2f}x{on_ranks(arm, record)})" if speedup else ""
        groups.setdefault(found, []).append(f"'{arm['name']}'{ratio}")
    over = "the rung before" if _adds_up(record) else f"'{record['reference']}'"
    trained = any(arm["training"] for arm in arms)
    sentences = {
        "faster": f"Faster than {over}{', without a shown loss of top-1' if trained else ''}",
        "faster at a loss": f"Faster than {over}, with a loss of top-1",
        "faster, ended": f"Faster than {over}, but training ended early",
        "slower": f"Slower than {over}",
        "open": f"Not shown to be faster or slower than {over}",
    }
    return [f"{words}: {', '.join(groups[found])}." for found, words in sentences.items() if found in groups]


_AGAINST_FIRST = ("speedup", "against_reference")


def _accuracies(arms: Sequence[Record], record: Record) -> list[str]:
    """What loses accuracy, and for what there are too few runs to tell."""
    key = "against_before" if _adds_up(record) else "against_reference"
    groups: dict[str, list[str]] = {}
    for arm in arms:
        groups.setdefault(_accuracy(arm, key), []).append(f"'{arm['name']}'")
    return [f"{words}: {', '.join(groups[found])}." for found, words in _COSTS.items() if found in groups]


_COSTS = {
    "loses": "Loses top-1",
    "ended": "Training ended early",
    "open": "Too few runs to exclude a loss of top-1",
}


def _speed(arm: Record, key: str) -> str:
    """Which side of 1 the interval of a speed-up is on: "faster", "slower", "open" or "unknown"."""
    found = arm["timing"] and arm["timing"][key]
    if not found:
        return "unknown"
    if found["low"] is None or found["high"] is None or found["low"] <= 1 <= found["high"]:
        return "open"
    return "faster" if found["low"] > 1 else "slower"


def _accuracy(arm: Record, key: str) -> str:
    """What is known of a loss: "loses", "kept", "open", "unknown", or "ended" for a training that ended early."""
    if (arm["training"] or {}).get("reason"):
        return "ended"
    found = (arm["training"] or {}).get(key)
    if not found:
        return "unknown"
    finding = found["verdict"]["finding"]
    return "loses" if finding in _LOSSES else "kept" if finding in ("identical", "no loss", "gain") else "open"


def _not_run(record: Record) -> list[str]:
    names = [f"'{arm['name']}'" for arm in record["arms"] if arm["status"] != "measured"]
    return [f"Not run here, or failed: {', '.join(names)}."] if names else []
