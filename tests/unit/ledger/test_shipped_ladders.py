"""The ladders that ship: what they measure, and what is left of them on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pycls_fast import build
from pycls_fast.config.keys import CONFIGS
from pycls_fast.config.ladder import Mode, for_experiment, read_ladder
from pycls_fast.ledger.ladder.ledger import Ledger
from pycls_fast.ledger.ladder.plan import pick
from pycls_fast.ledger.ladder.run import refusal
from pycls_fast.speed import SWITCHES
from tests.factories import config_of
from tests.unit.ledger.stand_ins import FakeProcess, made, run

# What vit_digits cannot have, beside what needs CUDA.
REFUSED = {"switches": {"convolution products"}}
SHIPPED = sorted((CONFIGS / "ladders").glob("*.yaml"))


def shipped(file: Path, mode: Mode, device: str, folder: Path, typed: Sequence[str] = ()) -> Ledger:
    ladder = for_experiment(read_ladder(file.stem, [CONFIGS]), config_of())
    return made(folder, ladder, device=device, typed=typed, mode=mode, rounds=1, numerics_steps=2, gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_one_process_takes_nothing_of_the_strategies(file: Path, tmp_path: Path, fake: type[FakeProcess]) -> None:
    """Rounding is measured by one process, whatever the variant, or the experiment, sets for several."""
    typed = ["parallel=hsdp", "parallel.reshard_after_forward=false", "parallel.shard_degree=2"]
    modes: dict[str, tuple[Mode, ...]] = {"parallel": ("crossed", "cumulative"), "switches": ("crossed",)}
    for mode in modes.get(file.stem, ("cumulative",)):
        ledger = shipped(file, mode, "cuda", tmp_path / mode, typed)
        ledger.selection.rule_out(lambda each: "not here" if each.name in REFUSED.get(file.stem, ()) else None)
        with ledger.folder.opened(ledger.plan()):
            run(ledger)
        measured = [each for each in fake.started if each[0].startswith("ledger ")]
        assert len(measured) == len(ledger.measurements()["rounding"]) + 1
        for arguments in measured:
            own = ("steps=", "output=")
            # Without the verb and `--config-name`.
            config = config_of(*([a for a in arguments[3:] if not a.startswith(own)]))
            assert config.parallel.name == "single"
        fake.started.clear()


@pytest.mark.slow
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_what_is_left_of_a_ladder_on_a_cpu_runs_there(file: Path, tmp_path: Path) -> None:
    """What a dry run lists and counts; it starts none of the variants."""
    cpu = torch.device("cpu")
    ledger = shipped(file, "crossed", "cpu", tmp_path)
    before = set(ledger.selection.out)
    ledger.selection.rule_out(lambda variant: refusal(variant, lambda overrides: config_of(*overrides), cpu))
    assert set(ledger.selection.out) - before == REFUSED.get(file.stem, set())
    for variant in ledger.selection.runnable():
        config = config_of(*variant.overrides)
        switches = build.switches(config, cpu)
        build.set_backend(config, cpu, switches)
        build.apply_precision(config, build.model(config, 10, switches), cpu)
        assert config.parallel.name != "fairscale_fsdp"


@pytest.mark.slow
def test_every_value_of_every_switch_runs_in_a_ladder_that_ships() -> None:
    """No switch exists unmeasured: the ledger can be asked for each by its name, and what it needs comes along."""
    ladder = read_ladder("switches", [CONFIGS])
    variants = {variant.name: variant for variant in ladder.variants}
    for switch, value in ((each, value) for each in SWITCHES.values() for value in each.values[1:]):
        variant, needed = variants[f"{switch.name} {value}"], switch.device.get(value)
        experiment = "vit_digits" if "vit" in switch.models else "resnet_digits"
        # The kernels that FlashAttention and cuDNN have are for 16 bits.
        half = ["precision=amp_bf16"] if value in ("sdpa_flash", "sdpa_cudnn") else []
        config = config_of(*ladder.baseline.overrides, *half, *variant.overrides, name=experiment)
        device = torch.device("cpu" if needed == "cpu" else "cuda")
        assert getattr(build.switches(config, device), switch.name) == value
        assert variant.needs == ("cuda" if needed == "cuda" else None)


def test_a_switch_is_one_change_away_from_what_it_is_compared_with() -> None:
    ladder = read_ladder("switches", [CONFIGS])
    found = {variant.name: dict(o.split("=") for o in variant.overrides) for variant in ladder.variants}
    for variant in ladder.variants:
        switch, value = variant.name.split()
        own, other = found[variant.name], found.get(str(variant.against), {})
        if value != "off":
            assert {key for key in {*own, *other} if own.get(key) != other.get(key)} == {f"speed.{switch}"}
    for switch, picked in {
        "decode_scale": ["decode region", "decode_scale dct"],
        "gelu": ["compile model", "gelu polynomial"],
        "mix_on": ["mix_on device"],
    }.items():
        assert [variant.name for variant in pick(ladder, [switch]).variants] == picked


@pytest.mark.parametrize(
    ("name", "experiment", "precision", "device", "more"),
    # On CUDA the preset has off what the ladder adds.
    [
        ("modern", "vit_digits", "fp8", "cuda", {"input_copy", "compile", "recompute"}),
        ("cpu", "vit_s16", "amp_bf16", "cpu", set()),
    ],
)
def test_a_ladder_ends_with_the_fast_step(
    name: str, experiment: str, precision: str, device: str, more: set[str]
) -> None:
    """For a ViT, but for the switches that a step is not timed with (images are prepared by the loader)."""
    ladder = read_ladder(name, [CONFIGS])
    overrides = [text for variant in (ladder.baseline, *ladder.variants) for text in variant.overrides]

    def values(*own: str) -> dict[str, str]:
        config = config_of("data.root=unread", *own, name=experiment)
        return build.switches(config, torch.device(device)).values()

    last, fast = values(*overrides), values("speed=fast", f"precision={precision}")
    # Those without models are not of a network.
    different = {
        switch.name
        for switch in SWITCHES.values()
        if (not switch.models or "vit" in switch.models) and last[switch.name] != fast[switch.name]
    }
    loading = {name for name in fast if name.endswith("_on")} | {"decode"}
    assert different - loading == more
