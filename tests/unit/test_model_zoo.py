"""The page of experiments and published weights."""

from __future__ import annotations

import json
import re

import pytest

from pycls_fast import published
from pycls_fast.config import load_config
from pycls_fast.config.locations import CONFIGS
from tools.model_zoo import MEASURED, PAGE, hours, page

# In a header: "Result: 89.3 top-1 ..." or "Result: the paper reports ...; measured here: 79.8 ...".
OURS = re.compile(r"Result: (?:.*measured here: )?(\d+\.\d)\b")

ENTRY = {"top1": 79.81, "hardware": "8 H200", "date": "2027-01-02", "command": "python tools/train_net.py"}


@pytest.mark.slow
def test_the_page_in_the_repository_is_what_the_tables_say() -> None:
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(measured), "run: python tools/model_zoo.py"


def table(text: str) -> dict[str, list[str]]:
    """Cells by the first one's name."""
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    return {row.split("`")[1]: [cell.strip() for cell in row.split("|")] for row in rows if "weights=" not in row}


@pytest.mark.slow
def test_a_number_is_either_published_or_measured() -> None:
    rows = {
        row.split("`")[1]: [cell.strip() for cell in row.split("|")] for row in page([]).splitlines() if "| `" in row
    }
    assert rows.keys() >= published.EXPERIMENTS.keys() | published.WEIGHTS.keys()
    assert (rows["deit_s16"][8], rows["deit_s16"][10]) == ("79.9", "not yet")
    assert (rows["deit3_b16"][8], rows["vit_p_1gf"][11]) == ("none", "")
    text = page([ENTRY | {"experiment": "deit_s16"}, ENTRY | {"weights": "timm:resnet50.a1_in1k", "top1": 81.2}])
    rows = table(text)
    assert (rows["deit_s16"][8], rows["deit_s16"][10]) == ("79.9", "79.81")
    assert rows["timm:resnet50.a1_in1k"][6] == "81.20"
    assert "- `deit_s16`: 79.81, 8 H200, 2027-01-02: `python tools/train_net.py`" in text
    text = page([ENTRY | {"experiment": "resnet_cifar10", "top1": 12.34, "minutes": 56, "note": "half of it"}])
    assert table(text)["resnet_cifar10"][6:9] == ["12.34", "56", "half of it"]
    assert table(text)["vit_cifar10"][6:9] == ["not yet", "", ""]
    assert "- `resnet_cifar10`: 12.34 (half of it), 8 H200" in text
    with pytest.raises(ValueError, match="no experiment and no weights of that name"):
        page([ENTRY | {"experiment": "deit_s17"}])


def test_a_number_in_the_header_of_an_experiment_is_that_of_the_page() -> None:
    told = {}
    for file in CONFIGS.glob("*.yaml"):
        header = file.read_text(encoding="utf-8").partition("defaults:")[0]
        result = re.sub(r"\s*\n# {12}", " ", header).partition("# Result:")[2].partition("\n")[0]
        found = OURS.match(f"Result: {result.strip()}")
        if found:
            told[file.stem] = found[1]
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    assert told == {entry["experiment"]: f"{entry['top1']:.1f}" for entry in measured if "experiment" in entry}


@pytest.mark.slow
@pytest.mark.parametrize("name", published.EXPERIMENTS)
def test_the_hours_in_the_header_of_an_experiment_are_those_of_the_page(name: str) -> None:
    config = load_config(name, ["data.root=/nowhere"])
    expected = hours(published.EXPERIMENTS[name], config.data, config.schedule.epochs)
    header = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").partition("# Result:")[0]
    assert f"by arithmetic at least {expected} hours on one H100" in header.partition("# Time:")[2]
