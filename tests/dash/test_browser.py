"""The page in a real browser: what it shows, compared with the files, and that nothing in them executes."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runs.made_runs import leaky_pack_batch, make_run
from whet.data import loader

pytestmark = pytest.mark.system("chromium")

WIDTHS = (1280, 390)
TABS = ("runs", "compare", "data", "search", "chat")
NASTY = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def until(page: Any, expression: str, seconds: float = 60) -> None:
    """Wait until an expression holds. The page's policy forbids Playwright's own way, which evaluates text in it."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(100)


def click_step(page: Any, step: int, steps: int) -> None:
    """Click the loss chart where a step is."""
    plot = page.locator("[data-chart=loss] .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.click(box["x"] + box["width"] * (step / steps), box["y"] + box["height"] / 2)


def test_from_the_list_to_the_conversations_of_a_step(dash, tiny_run, tmp_path, open_page):
    """The short way through: list, run, a point of the curve, its conversations with their masks."""
    runs = tmp_path / "runs"
    shutil.copytree(tiny_run, runs / "tiny", ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    make_run(runs / NASTY.replace("/", "∕"), state="failed", reason=NASTY)
    page = open_page(dash(runs).url)
    page.get_by_role("link", name="tiny", exact=True).click()
    page.wait_for_selector("[data-chart=loss] canvas")
    click_step(page, 6, 12)
    page.wait_for_selector("article.conversation .learned")
    shown = page.locator("article.conversation").count()
    assert shown == 4
    text = page.locator("article.conversation .tokens").first.inner_text()
    assert "<|im_start|>assistant" in text
    assert "whet" in page.title()
    page.goto(page.url.partition("#")[0] + "#/runs")
    page.wait_for_selector("text=onerror")  # shown as text
    assert "owned" not in page.title()


# The rest takes minutes.


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, whet: Callable[..., Any]) -> Path:
    """A run on orders of which one, line 98, has an answer of random characters; its folder holds markup, too."""
    from whet.data.builtin import generate_orders

    folder = tmp_path_factory.mktemp("planted")
    draw = random.Random(0)
    samples = itertools.islice(generate_orders("train"), 120)
    lines = [{"messages": [message.as_dict() for message in sample.messages]} for sample in samples]
    lines[97]["messages"][-1]["content"] = "".join(draw.choices("QZXJ#@%&~^|", k=90))
    lines[50]["messages"][0]["content"] = NASTY
    lines[51]["messages"].pop()
    (folder / "orders.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = folder / "planted.yaml"
    recipe.write_text(
        "model: {path: builtin:tiny}\nrun: {seed: 3, tags: [planted]}\n"
        f"data: {{sources: [{{path: {folder / 'orders.jsonl'}}}], validation: {{fraction: 0.1}}, max_length: 256, "
        "on_bad: skip}\n"
        "train: {epochs: 3, batch: {conversations: 4}, optimizer: {lr: 3e-3}}\n"
        "checkpoint: {every: 10, keep_every: 10, optimizer: all}\neval: {every: 20, tasks: [orders]}\n"
    )
    for name, rate in (("planted", "3e-3"), ("slower", "1e-3")):
        ended = whet("train", recipe, f"run.dir={folder / 'runs' / name}", f"train.optimizer.lr={rate}")
        assert ended.code == 0, ended.err
    return folder / "runs"


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_a_bad_conversation_is_found_by_its_spike_in_three_clicks(dash, planted, open_page):
    by_step = losses(planted / "planted")
    late = {step: loss for step, loss in by_step.items() if step > len(by_step) // 2}
    spike = max(late, key=late.__getitem__)
    page = open_page(dash(planted).url)
    page.get_by_role("link", name="planted", exact=True).click()  # 1
    page.wait_for_selector("[data-chart=loss] canvas")
    click_step(page, spike, len(by_step))  # 2
    first = page.locator("article.conversation").first
    page.wait_for_selector("article.conversation")
    assert "orders.jsonl:98" in first.inner_text()
    page.wait_for_selector("article.conversation .token", timeout=180_000, state="attached")  # replayed
    hot = (
        page.locator("article.conversation")
        .first.locator(".token")
        .evaluate_all("tokens => tokens.map(token => Number(token.title.match(/loss ([\\d.e-]+)/)[1]))")
    )
    assert sum(hot) / len(hot) > 2 * min(late.values())
    page.get_by_role("button", name="suspicious labels").click()  # 3: the other way to it
    page.wait_for_selector(".histories")
    assert "orders.jsonl:98" in page.locator(".histories").inner_text()
    assert page.title() != "owned"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_tab_shows_real_runs_at_every_width_and_scheme(dash, planted, open_page, width, scheme):
    server = dash(planted)
    page = open_page(server.url, width, scheme)
    for place in (*TABS, "run/planted", "compare?run=planted&run=slower", "data/planted", "chat/slower"):
        page.goto(f"{server.url}/#/{place}")
        page.wait_for_selector("main h1")
        page.wait_for_load_state("networkidle") if "run" not in place else page.wait_for_timeout(1500)
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{place} is {overflow} pixels wider than the screen"
        assert page.locator("main .bad").filter(has_text="cannot").count() == 0
    page.goto(f"{server.url}/#/run/planted")
    page.wait_for_selector("[data-chart=loss] canvas")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(21, 23, 26)") == (scheme == "dark")


@pytest.mark.slow
def test_what_a_run_shows_is_what_its_files_say(dash, planted, open_page):
    run = planted / "planted"
    page = open_page(f"{dash(planted).url}/#/run/planted")
    page.wait_for_selector("[data-chart=loss] canvas")
    final = losses(run)[max(losses(run))]
    assert f"{final:.4f}" in page.locator(".tiles").first.inner_text()
    ledger = json.loads((run / "ledger.json").read_text())["sources"][0]
    assert f"{ledger['conversations']['in']:,} in" in page.locator("#ledger").text_content()
    dropped = next(iter(ledger["reasons"]))
    page.get_by_role("button", name=f"Lines: dropped: {dropped}").click()
    page.wait_for_selector("#ledger .panel")
    assert "52" in page.locator("#ledger .panel td[data-label=line]").first.inner_text()
    assert page.locator(".promise.proven").count() >= 5
    assert "✓ verified" in page.locator("#exports").inner_text()
    log = (run / "logs" / "rank-0.log").read_text().splitlines()[-1]
    until(page, f"document.querySelector('.log').textContent.includes({json.dumps(log[:60])})")


@pytest.mark.slow
def test_the_check_of_a_run_turns_its_badge(dash, planted, tmp_path, open_page, whet, monkeypatch):
    shutil.copytree(planted / "planted", tmp_path / "runs" / "checked")
    page = open_page(f"{dash(tmp_path / 'runs').url}/#/run/checked")
    badge = page.locator(".promise").filter(has_text="The layout does not matter")
    badge.wait_for()
    assert "open" in badge.get_attribute("class")
    command = badge.locator("code").inner_text().split()
    assert command[0] == "whet"
    for plant_leak, state in ((False, "proven"), (True, "broken")):
        if plant_leak:
            monkeypatch.setattr(loader, "pack_batch", leaky_pack_batch)
        assert whet(*command[1:]).code == plant_leak
        page.reload()
        badge.wait_for()
        assert state in badge.get_attribute("class")
        assert "losses of conversations" in badge.inner_text()


@pytest.mark.slow
def test_runs_are_filtered_by_numbers_and_charts_enlarged(dash, planted, open_page):
    final = {name: min(losses(planted / name).items(), key=lambda each: -each[0])[1] for name in ("planted", "slower")}
    page = open_page(dash(planted).url)
    page.wait_for_selector("table.runs td")
    page.get_by_label("Filter the runs").fill(f"loss<{sum(final.values()) / 2:.3f}")
    until(page, "document.querySelectorAll('table.runs tbody tr').length == 1")
    assert page.locator("table.runs tbody tr").inner_text().strip().startswith(min(final, key=final.__getitem__))
    page.goto(f"{page.url.partition('#')[0]}#/run/planted")
    small = page.locator("[data-chart=grad_norm]")
    small.locator("canvas").wait_for()
    before = small.bounding_box()["width"]
    page.get_by_role("button", name="Enlarge gradient norm").click()
    until(page, f"document.querySelector('[data-chart=grad_norm] canvas').clientWidth > {1.5 * before}")


def test_a_row_of_the_list_is_one_line_on_a_tablet(dash, tmp_path, open_page):
    make_run(tmp_path / "support-3")
    page = open_page(dash(tmp_path).url, 820)
    page.wait_for_selector(".runs tbody tr")
    assert page.evaluate("document.querySelector('.runs tbody tr').offsetHeight") < 60
    assert page.evaluate("document.documentElement.scrollWidth") <= 820


@pytest.mark.slow
def test_two_runs_are_compared(dash, planted, open_page):
    page = open_page(dash(planted).url)
    for name in ("planted", "slower"):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("button", name="Compare 2").click()
    page.wait_for_selector("[data-chart=loss] canvas")
    assert "p =" in page.locator(".verdicts").inner_text()
    assert "train.optimizer.lr" in page.locator("#settings-that-differ").inner_text()


@pytest.mark.slow
def test_both_models_answer_and_a_thumb_writes_a_line(dash, planted, open_page):
    page = open_page(f"{dash(planted).url}/#/chat/planted")
    page.get_by_label("Message", exact=True).fill("Please send two green mugs to Sofia in Madrid by Wed.")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.turn .thumb').length == 4", 240)
    tuned = page.locator(".chat section").first
    assert "item" in tuned.inner_text()
    assert "%" in tuned.locator(".token").first.get_attribute("title")
    tuned.get_by_role("button", name="Good answer").click()
    page.wait_for_selector(".message.good")
    (line,) = (planted / "planted" / "feedback" / "good.jsonl").read_text().splitlines()
    assert json.loads(line)["messages"][0]["content"].startswith("Please send two green mugs")


@pytest.mark.slow
def test_the_keyboard_reaches_a_step(dash, planted, open_page):
    page = open_page(f"{dash(planted).url}/#/run/planted")
    page.wait_for_selector("[data-chart=loss] canvas")
    page.locator("[data-chart=loss]").focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "step 3" in page.locator("[data-chart=loss] output").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Step 3: 4 conversations")


@pytest.mark.slow
def test_an_empty_folder_a_damaged_run_and_a_long_one(dash, tmp_path, open_page):
    server = dash(tmp_path / "runs")
    page = open_page(server.url)
    for tab in TABS:
        page.goto(f"{server.url}/#/{tab}")
        page.wait_for_selector("main .empty")
    bad = make_run(tmp_path / "runs" / "bad", state="failed", reason=NASTY)
    for name in ("plan.json", "ledger.json", "status.json", "effect.json"):
        (bad / name).write_bytes(b"\x00\xff{")
    long = make_run(tmp_path / "runs" / "long")
    with (long / "metrics.jsonl").open("w") as file:
        for step in range(1, 501):
            loss = 5 / step + (50 if step == 333 else 0)
            file.write(
                json.dumps({"time": step, "step": step, "loss": loss, "lr": 1e-3, "tokens": step, "step_s": 1}) + "\n"
            )
    page.goto(f"{server.url}/#/run/bad")
    page.wait_for_selector(".problems")
    assert "plan.json: damaged" in page.locator(".problems").inner_text()
    page.goto(f"{server.url}/#/run/long")
    page.wait_for_selector("[data-chart=loss] canvas")
    plot = page.locator("[data-chart=loss] .u-over").bounding_box()
    page.mouse.move(plot["x"] + plot["width"] * (332 / 499), plot["y"] + 20)
    until(page, "document.querySelector('[data-chart=loss] output').textContent.includes('50.0')")
    assert page.title() != "owned"


@pytest.mark.slow
def test_a_curve_grows_while_a_run_trains_and_stop_ends_it_with_a_checkpoint(dash, tmp_path, recipe, open_page):
    runs = tmp_path / "runs"
    with subprocess.Popen(
        [sys.executable, "-m", "whet", "train", recipe, f"run.dir={runs / 'live'}", "train.steps=100000",
         "checkpoint.every=100000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            while not (runs / "live" / "metrics.jsonl").exists():
                time.sleep(0.2)
            page = open_page(f"{dash(runs).url}/#/run/live")
            page.wait_for_selector("[data-chart=loss] canvas")
            page.wait_for_selector(".live.on")
            page.locator("[data-chart=loss]").focus()
            page.keyboard.press("End")
            read = "Number(document.querySelector('[data-chart=loss] output').textContent.match(/step ([\\d.]+)/)[1])"
            before = page.evaluate(read)
            page.wait_for_timeout(3000)
            page.keyboard.press("End")
            assert page.evaluate(read) > before
            page.get_by_role("button", name="Stop").click()
            page.wait_for_selector(".state.stopped", timeout=120_000)
            assert process.wait(60) == 75
            assert list((runs / "live" / "checkpoints").glob("step-*"))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
