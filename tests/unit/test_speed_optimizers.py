"""What is known of optimizers fits together, and their settings arrive."""

from __future__ import annotations

import pytest
import torch

from pycls_fast import build
from pycls_fast.config import load_config
from pycls_fast.optim.choices import Optimizer as Chosen
from pycls_fast.optim.choices import optimizers_with

NAMES = sorted(Chosen.choices())


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
