"""The report in a real browser without network."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from whet.report.run_reports import write_report

pytestmark = pytest.mark.system("chromium")

_POINT = """<script>
const plot = document.querySelector(".plot");
const box = plot.getBoundingClientRect();
plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 1, clientY: box.top + 5}));
</script>"""


def _open(page: Path, tmp_path: Path) -> tuple[str, str]:
    """The document after its scripts ran, and the console messages."""
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/browser",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_a_chart_shows_the_value_at_the_pointer(make_run, tmp_path):
    page = write_report(make_run())
    page.write_text(page.read_text().replace("</body>", f"{_POINT}</body>"))
    document, messages = _open(page, tmp_path)
    assert messages == ""
    (output, *_) = re.findall(r"<output[^>]*>([^<]+)</output>", document)
    assert output.startswith("step 3 · ")
