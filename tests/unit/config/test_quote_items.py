"""`compare=[...]` on the command line."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pycls_fast.config.quoting import quote_items


@pytest.mark.parametrize(
    ("argument", "items"),
    [
        ("compare=[a=1,b=2]", ["a=1", "b=2"]),
        ("compare=[a=1 b=2, c=3]", ["a=1 b=2", "c=3"]),
        ("compare=[a.b=[0.9,0.95] c={d:1,e:2},x=y]", ["a.b=[0.9,0.95] c={d:1,e:2}", "x=y"]),
        ("compare=[,a=1]", ["", "a=1"]),
        ("compare=[\"a=1,2\",'b=3']", ["a=1,2", "b=3"]),
        ("compare=[a='x,y',b=2]", ["a='x,y'", "b=2"]),
        ('compare=[a="x",b=2]', ['a="x"', "b=2"]),
        ("optim.betas=[0.9,0.95]", [0.9, 0.95]),
        ("run_dir=a", "a"),
    ],
)
def test_items_with_an_equals_sign_reach_hydra_as_text(argument: str, items: object) -> None:
    value = OverridesParser.create().parse_override(quote_items(argument)).value()
    assert value == items


@pytest.mark.parametrize("argument", ["a=1", "optim.betas=[0.9,0.95]", "--config-name", "a=b=[c", "speed=fast"])
def test_other_arguments_stay_as_they_are(argument: str) -> None:
    assert quote_items(argument) == argument
