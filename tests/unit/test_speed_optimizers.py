"""Which implementation of an optimizer a preset takes, and what is said of one that there is not."""

from __future__ import annotations

import typing

import pytest
import torch

from pycls_fast import build, speed
from pycls_fast.config import load_config
from pycls_fast.errors import UserError
from pycls_fast.optim.choices import Optimizer as Chosen
from pycls_fast.optim.choices import optimizers_with
from pycls_fast.speed import SwitchName

DEVICES: tuple[speed.Device, ...] = typing.get_args(speed.Device)
NAMES = sorted(Chosen.choices())
CONFIGURED = {name: chosen(lr=1.0) for name, chosen in Chosen.choices().items()}


def test_the_implementations_of_every_optimizer_fit_together() -> None:
    for facts in Chosen.choices().values():
        there = set(facts.implementations)
        assert facts.implementations[0] == "loop"
        assert set(facts.compilable) <= there - {"fused"}
        assert set(facts.shardable) <= there
        assert set(facts.capturable) <= there
        # `speed.resolve` chooses one that is both.
        assert set(facts.shardable) & set(facts.compilable) or not (facts.shardable and facts.compilable)
    for name, facts in Chosen.choices().items():
        assert set(facts.state_keys) <= set(load_config("vit_digits", [f"optim={name}"]).optim.own())


def test_messages_name_the_optimizers_that_have_a_property() -> None:
    assert optimizers_with(lambda facts: facts.elementwise) == "adamw, sgd or lion"
    assert optimizers_with(lambda facts: facts.capturable) == "adamw or sgd"
    assert optimizers_with(lambda facts: facts.needs_units) == "muon"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_presets_take_what_there_is(name: str, device: speed.Device) -> None:
    assert speed.resolve("reference", {}, device, CONFIGURED[name])[SwitchName.OPTIMIZER] == "loop"
    there = Chosen.choices()[name].implementations
    # foreach is slower than the loop on a CPU.
    wanted = "fused" if "fused" in there else there[-1] if device == "cuda" else "loop"
    assert speed.resolve("fast", {}, device, CONFIGURED[name])[SwitchName.OPTIMIZER] == wanted


@pytest.mark.parametrize("preset", ["reference", "fast"])
@pytest.mark.parametrize("name", NAMES)
def test_by_hand_it_exists_or_the_line_names_those_that_do(name: str, preset: str) -> None:
    for value in ("loop", "foreach", "fused"):
        chosen = {SwitchName.OPTIMIZER: value}
        if value in Chosen.choices()[name].implementations:
            assert speed.resolve(preset, chosen, "cpu", CONFIGURED[name])[SwitchName.OPTIMIZER] == value
            continue
        with pytest.raises(UserError) as caught:
            speed.resolve(preset, chosen, "cpu", CONFIGURED[name])
        way_out = f"use speed.optimizer={' or '.join(Chosen.choices()[name].implementations)}"
        assert caught.value.lines == (f"speed.optimizer: optim.name={name} has no {value}; {way_out}",)


@pytest.mark.parametrize("preset", ["reference", "fast"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"adamw8bit"}))
def test_compiled_it_is_one_that_compiles(name: str, preset: str) -> None:
    compiled = {SwitchName.OPTIMIZER_COMPILE: "on"}
    value = speed.resolve(preset, compiled, "cpu", CONFIGURED[name])[SwitchName.OPTIMIZER]
    assert value in Chosen.choices()[name].compilable
    for chosen in Chosen.choices()[name].implementations:
        by_hand = {**compiled, SwitchName.OPTIMIZER: chosen}
        if chosen in Chosen.choices()[name].compilable:
            assert speed.resolve(preset, by_hand, "cpu", CONFIGURED[name])[SwitchName.OPTIMIZER] == chosen
            continue
        with pytest.raises(UserError) as caught:
            speed.resolve(preset, by_hand, "cpu", CONFIGURED[name])
        why = "cannot be compiled (speed.optimizer_compile=on)"
        way_out = f"use speed.optimizer={' or '.join(Chosen.choices()[name].compilable)}"
        assert caught.value.lines == (f"speed.optimizer: optim.name={name} with {chosen} {why}; {way_out}",)


def test_what_compiles_itself_is_not_compiled_twice() -> None:
    with pytest.raises(UserError) as caught:
        speed.resolve("fast", {SwitchName.OPTIMIZER_COMPILE: "on"}, "cuda", CONFIGURED["adamw8bit"])
    assert caught.value.lines == (
        "speed.optimizer_compile: optim.name=adamw8bit compiles itself; use speed.optimizer_compile=off",
    )


def test_the_configuration_asks_for_its_optimizer() -> None:
    config = load_config("vit_digits", ["optim=lion", "speed=fast"])
    assert build.switches(config, torch.device("cpu"))[SwitchName.OPTIMIZER] == "loop"
    assert build.switches(config, torch.device("cuda"))[SwitchName.OPTIMIZER] == "foreach"
    wrong = load_config("vit_digits", ["optim=lion", "speed.optimizer=fused"])
    with pytest.raises(UserError, match=r"^speed\.optimizer: optim\.name=lion has no fused; use speed\.optimizer=loop"):
        build.switches(wrong, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"adamw8bit"}))
def test_settings_arrive(name: str) -> None:
    """Each key that an optimizer has of its own changes what is built."""
    changed: dict[str, object] = {
        "betas": [0.5, 0.6], "eps": 0.125, "momentum": 0.25, "nesterov": "false", "momentum_dtype": "float32",
        "beta2_decay": 0.5, "beta2_cap": 0.75, "min_factored": 7, "clip_threshold": 3.0, "newton_schulz_steps": 2,
    }  # fmt: skip
    called = {
        "betas": ("betas", (0.5, 0.6)), "eps": ("eps", 0.125), "momentum": ("momentum", 0.25),
        "nesterov": ("nesterov", False), "momentum_dtype": ("momentum_dtype", torch.float32),
        "beta2_decay": ("decay_rate", 0.5), "beta2_cap": ("beta2_cap", 0.75),
        "min_factored": ("min_dim_size_to_factor", 7), "clip_threshold": ("clipping_threshold", 3.0),
        "newton_schulz_steps": ("ns_steps", 2),
    }  # fmt: skip
    plain = load_config("vit_digits", [f"optim={name}", "optim.lr=0.5"])
    own = set(plain.optim.own())
    assert own <= set(changed), "another value of each key that is new belongs into both tables"
    config = load_config(
        "vit_digits", [f"optim={name}", "optim.lr=0.5", *(f"optim.{key}={changed[key]}" for key in sorted(own))]
    )
    switches = build.switches(config, torch.device("cpu"))
    made = build.optimizer(config, build.model(config, 10, switches), switches)
    assert own
    for group in made.param_groups:
        if name == "muon" and not group["hidden"]:
            assert group["nesterov"] is False
        for key in own - ({"nesterov"} if name == "muon" else set()):
            where, value = called[key]
            # Muon's own eps is that of its iteration; AdamW's part takes the configured one.
            if (name, key) == ("muon", "eps") and group["hidden"]:
                value = 1e-7
            assert group[where] == value, key
        assert group["lr"] == 0.5
    assert sum(p.numel() for group in made.param_groups for p in group["params"]) == sum(
        p.numel() for p in build.model(config, 10, switches).parameters()
    )
