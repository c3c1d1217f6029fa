"""The page over all folds: each image once, in the order of the page, by the run that did not see it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pycls_fast import build
from pycls_fast.commands.measure import RunsVerb
from pycls_fast.errors import UserError
from tests.factories import config_of
from tests.unit.ledger.test_compare import make_run


def test_a_page_over_all_folds(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    # Losses after which the images of the folds alternate.
    wrong = {(fold, place): 3.0 + fold + 3 * place / 10 for fold in range(3) for place in (10 * fold, 100, 200)}
    names = {}
    for fold in range(3):
        # What is chosen by itself may differ.
        words = ("data.folds=3", f"data.fold={fold}", f"precision={('fp32', 'amp_bf16', 'bf16')[fold]}")
        own = {place: (fold, loss) for (number, place), loss in wrong.items() if number == fold}
        make_run(runs / str(fold), digits, own, *words)
        config = config_of(f"data.root={digits}", *words)
        with build.world(config) as world:
            source = build.sources(config, world)["val"]
        names.update({(fold, place): source.name(place) for place in own})
    assert RunsVerb(folders=(str(runs),), report=str(tmp_path / "page"))() == 0
    html = (tmp_path / "page" / "index.html").read_text()
    assert f"page: {tmp_path}" in capsys.readouterr().out
    shown = re.findall("<small>(.*)</small>", html)
    assert sorted(shown) == sorted(names.values())
    assert shown[0] == names[max(wrong, key=lambda key: wrong[key])]
    assert "<p>9 images" in html
    assert "1,797 of 1,797" in html
    assert "99.50%" in html
    assert re.search(r"balanced accuracy</td>\s*<td[^>]*>99[.]5\d%", html)
    assert "Shown and searched" not in html
    make_run(runs / "again", digits, {}, "data.folds=3", "data.fold=2")
    with pytest.raises(UserError, match=r"^report: these are not runs of different folds"):
        RunsVerb(folders=(str(runs),), report=str(tmp_path / "page"))()
    (runs / "1" / "predictions.npz").unlink()
    with pytest.raises(UserError, match=r"^report: the images of .*/1 cannot be shown: they have several labels, have"):
        RunsVerb(folders=(str(runs / "0"), str(runs / "1")), report=str(tmp_path / "page"))()
