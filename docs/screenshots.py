"""Take the screenshots of these pages again, in Chromium: python docs/screenshots.py ~/orders

The runs are made in that folder, unless they are there: two on orders of which one has a wrong answer, and the demo.
Use an idle machine, because the report shows times."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from whet.data.builtin import generate_orders

DOCS = Path(__file__).parent
BAD_LINE = 98
RECIPE = """
model: {path: "builtin:tiny"}
run: {seed: 3, tags: [orders]}
data: {sources: [{path: orders.jsonl}], validation: {fraction: 0.1}, max_length: 256}
train: {epochs: 4, batch: {conversations: 4}, optimizer: {lr: 3e-3}}
checkpoint: {every: 20, keep_every: 20, optimizer: all}
eval: {every: 20}
"""


def whet(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "whet", *arguments, "--quiet"], cwd=folder, check=True)


def make_runs(folder: Path) -> None:
    samples = itertools.islice(generate_orders("train"), 240)
    lines = [{"messages": [message.as_dict() for message in sample.messages]} for sample in samples]
    lines[BAD_LINE - 1]["messages"][-1]["content"] = "".join(random.Random(0).choices("QZXJ#@%&~^|", k=90))
    (folder / "orders.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "orders.yaml").write_text(RECIPE)
    for rate in ("3e-3", "1e-3"):
        if not (folder / "runs" / f"orders-{rate}").exists():
            whet(folder, "train", "orders.yaml", f"run.dir=runs/orders-{rate}", f"train.optimizer.lr={rate}")
    if not (folder / "runs" / "demo").exists():
        whet(folder, "train", str(DOCS.parent / "recipes" / "demo.yaml"), "run.dir=runs/demo")


def worst_late_step(run: Path) -> tuple[int, int]:
    """The step with the highest loss in the second half, and the number of steps."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return max((step for step in losses if 2 * step > len(losses)), key=losses.__getitem__), len(losses)


def take(browser: Any, url: str, runs: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 1180})
    page.set_default_timeout(180_000)
    step, steps = worst_late_step(runs / "orders-3e-3")
    page.goto(f"{url}#/run/orders-3e-3?step={step}")
    page.wait_for_selector("article.conversation .token", state="attached")
    page.evaluate("scrollTo(0, document.querySelector('#curves .controls').getBoundingClientRect().top + scrollY - 70)")
    plot = page.locator("[data-chart=loss] .u-over").bounding_box()
    page.mouse.move(plot["x"] + plot["width"] * step / steps, plot["y"] + 60)
    page.wait_for_timeout(500)
    page.screenshot(path=DOCS / "dash-run.png")
    page.set_viewport_size({"width": 1280, "height": 1000})
    page.goto(f"{url}#/compare?run=orders-3e-3&run=orders-1e-3")
    page.wait_for_selector("[data-chart=loss] canvas")
    page.wait_for_timeout(1000)
    page.screenshot(path=DOCS / "dash-compare.png")
    page.set_viewport_size({"width": 1200, "height": 1850})
    page.goto((runs / "demo" / "report.html").as_uri())
    page.screenshot(path=DOCS / "report.png")


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    make_runs(folder)
    command = [sys.executable, "-m", "whet", "dash", str(folder / "runs"), "--json"]
    with sync_playwright() as playwright, subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            take(browser, url, folder / "runs")
            browser.close()
        finally:
            server.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
