"""The chat page in a real browser."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whet.data.conversation import Message
from whet.inference.inference_model import InferenceModel
from whet.inference.sampling import Sampling


@pytest.mark.slow
@pytest.mark.system("chromium", "chromium")
def test_a_conversation_in_the_browser(server: str, tiny: InferenceModel) -> None:
    """`test_the_page_has_no_script_or_style_of_its_own` is the faster one."""
    from playwright.sync_api import sync_playwright

    question = "Hello <img src=x onerror=alert(1)>"
    prompt = tiny.prompt_ids([Message("user", question)])
    expected = replace(tiny, sampling=Sampling(max_new_tokens=12)).reply(prompt).text
    problems: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.goto(server)
        page.locator("#model option").wait_for(state="attached")
        page.fill("#limit", "12")
        page.fill("#text", question)
        page.keyboard.press("Enter")
        page.locator(".message").nth(1).wait_for()
        page.locator("#send", has_text="Send").wait_for()
        texts = [box.text_content() for box in page.locator(".message p").all()]
        assert texts == [question, f"{expected} …"]
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=alert(1)>')")
        page.fill("#text", "And now?")
        page.keyboard.press("Enter")
        page.locator(".message").nth(3).wait_for()
        page.locator("#send", has_text="Send").wait_for()
        page.click("#reset")
        assert page.locator(".message").count() == 0
        browser.close()
    assert [problem for problem in problems if "Content Security Policy" not in problem and "404" not in problem] == []
    assert any("Content Security Policy" in problem for problem in problems), "the forged markup was executed"
