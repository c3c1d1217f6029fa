"""The report in a browser, where there is one: nothing sticks out of a phone's page or a laptop's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pycls_fast.ledger.report.page import charts, ledger_page
from pycls_fast.ledger.report.record import read_record

RESULTS = Path(__file__).parents[3] / "docs" / "results"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")

# In a frame, because a browser's window cannot be as narrow as a phone. The page has no script of its own.
_FRAME = """<!doctype html><body><iframe id=frame style="width:{width}px;height:900px;border:0"></iframe><script>
const frame = document.getElementById("frame");
frame.onload = () => {{
  const page = frame.contentDocument.documentElement;
  document.body.dataset.widths = page.scrollWidth + "/" + page.clientWidth;
}};
frame.srcdoc = {text};
</script></body>"""


def overflow(text: str, width: int, folder: Path) -> int:
    """By how many pixels a page is wider than its frame."""
    file = folder / "frame.html"
    # "</script>" inside the text would end the script.
    file.write_text(_FRAME.format(width=width, text=json.dumps(text).replace("</", "<\\/")), encoding="utf-8")
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        pytest.skip(f"{BROWSER} does not run here (status {done.returncode})")
    found = re.search(r'data-widths="(\d+)/(\d+)"', done.stdout)
    content, visible = map(int, found.groups())
    assert visible in range(width - 20, width + 1), "a scroll bar is not as wide"
    return content - visible


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_does_not_scroll_sideways(width: int, tmp_path: Path) -> None:
    record = read_record(RESULTS / "ledger_cpu" / "ledger.json")
    text = ledger_page(record, charts(record))
    assert overflow(text, width, tmp_path) == 0
    wide = f"<p style='width:{width + 100}px;max-width:none'>wide</p></body>"
    assert overflow(text.replace("</body>", wide), width, tmp_path) > 0
