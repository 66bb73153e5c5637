"""The page in a browser: both answers, their equality, rounds, charts, keys, keyboard, narrow screens and mistakes."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from kit.checkpoints import SMALL, TARGET
from kit.engines import plain
from kit.servers import TEMPLATE, Running, drafting, running, serving, until

PATIENCE_MS = 300_000  # a limit that ends a hang
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
ASKED = {"f-max_tokens": "40", "f-seed": "7", "f-temperature": "0.8"}
DRAFTER = f"model:{SMALL}"
EVIL = "<img src=x onerror=\"document.title='broken'\"></div>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; a machine without it skips these tests, unless it is CI's."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("playwright is not installed: pip install -e '.[dev]'")
    if not BROWSER:
        absent("there is no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        own = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield own
        own.close()


def absent(why: str) -> None:
    """End the tests here: as failures where a skip would go unnoticed."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


server = serving(lambda: drafting(f"mix[ngram,model:{SMALL}]"))


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    """The page, which must log no error and send no request to another server."""
    with opened(browser, server) as found:
        yield found


class opened:  # noqa: N801
    """A page of a server; `problems` are the errors in its console."""

    def __init__(self, browser: Any, server: Running, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.server = server

    def __enter__(self) -> Any:
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self.on_console)
        self.page.on("request", self.check)
        self.page.goto(self.server.url)
        return self.page

    def on_console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "status of 4" not in message.text:
            self.problems.append(message.text)

    def check(self, request: Any) -> None:
        if not request.url.startswith(self.server.url):
            self.problems.append(request.url)

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert self.problems == []


def asked(page: Any, prompt: str = "Once upon a time", **fields: str) -> None:
    """Fill the form and run it."""
    page.wait_for_selector("#f-seed")
    page.fill("#prompt", prompt)
    for name, value in {**ASKED, **fields}.items():
        page.locator(f"#{name}").evaluate("(e) => e.closest('details')?.setAttribute('open', '')")
        page.fill(f"#{name}", value)
    if page.is_enabled("#f-drafter"):
        page.select_option("#f-drafter", DRAFTER)
    page.click("#run")


def finished(page: Any) -> str:
    """The verdict, once there is one."""
    page.wait_for_selector("#verdict.good, #verdict.bad")
    return str(page.inner_text("#verdict"))


def test_both_answers_are_those_of_the_library_and_reported_as_equal(page: Any, server: Running) -> None:
    asked(page)
    assert "The same 40 tokens as plain decoding, one by one (seed 7)." in finished(page)
    params = SamplingParams(max_tokens=40, seed=7, temperature=0.8)
    expected = plain().generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text
    for name in ("drafted", "plain"):
        assert (
            page.locator(f"#lane-{name} .answer").evaluate(
                "(e) => [...e.querySelectorAll('.tok')].map((t) => t.textContent).join('')"
            )
            == expected
        )
        page.locator(f"#lane-{name} .speed", has_text="tokens/s").wait_for()
    assert page.locator("#lane-drafted .tok.drafted").count() > 0
    assert page.locator("#lane-drafted .tok.recovered").count() > 0
    assert page.locator("#lane-plain .tok:not(.target)").count() == 0
    assert "depth 1:" in page.get_attribute("#chart-depth", "aria-label")
    assert "Plain:" in page.get_attribute("#chart-speed", "aria-label")
    assert page.locator(".chart canvas").count() == 3
    # the rounds, with the mouse and with the keyboard
    page.locator("#lane-drafted .tok.recovered").first.hover()
    assert "rejected" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")
    page.focus("#lane-drafted .answer")
    page.keyboard.press("End")
    assert "Round" in page.inner_text("#tip")
    page.keyboard.press("Home")
    assert "nothing drafted" in page.inner_text("#said") or "drafted" in page.inner_text("#said")
    page.check("#inline")
    assert page.locator("#lane-drafted del.rejected").first.is_visible()
    # again from the recorded times
    page.click("#replay")
    page.wait_for_selector(".tok[hidden]", state="detached")
    assert page.locator("#lane-drafted .numbers").inner_text().startswith("40 tokens")


@pytest.mark.parametrize("at_once", [False, True])
def test_at_the_same_time_with_a_chosen_drafter_and_tree_by_keyboard_alone(page: Any, at_once: bool) -> None:
    """Speeds are compared where both are known: on a busy machine all tokens of an answer may arrive at once."""
    if at_once:
        page.route("**/v1/completions", lambda route: route.fulfill(response=route.fetch()))
    page.wait_for_selector("#f-seed")
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("Lily and Tom went to")
    for name, value in (("f-depth", "3"), ("f-width", "2"), ("f-max_tokens", "24"), ("f-seed", "3")):
        page.focus(f"#{name}")
        page.keyboard.press("Control+A")
        page.keyboard.type(value)
    page.select_option("#f-drafter", DRAFTER)
    page.locator("input[name=race]:checked").press("ArrowDown")
    page.wait_for_selector("input[name=race][value=beside]:checked")
    page.keyboard.press("Control+Enter")
    verdict = finished(page)
    assert "The same 24 tokens as plain decoding, one by one (seed 3)." in verdict
    speeds = [page.inner_text(f"#lane-{name} .speed") for name in ("drafted", "plain")]
    assert all("tokens/s" in speed for speed in speeds)
    assert ("while both shared the machine" in verdict) == all(speed.endswith("tokens/s") for speed in speeds)
    assert not at_once or "while both shared" not in verdict
    page.focus("#lane-drafted .answer")
    page.keyboard.press("End")
    assert not page.get_attribute("#chart-rounds", "aria-label").startswith("0 draft tokens")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert f"by {DRAFTER}, " in page.inner_text("#said")


def test_a_chat_uses_the_models_template_and_keeps_the_conversation(browser: Any, tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
    bodies: list[dict[str, Any]] = []
    with LLM(str(tmp_path / "model"), draft="ngram") as llm, running(llm) as own, opened(browser, own) as page:
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        page.wait_for_selector("#f-seed")
        assert page.is_checked("#chat")
        assert page.inner_text("#prompt-label") == "Message"
        talk: list[dict[str, str]] = []
        for text in ("Once upon a time", "The dog"):
            asked(page, text)
            finished(page)
            talk.append({"role": "user", "content": text})
            assert bodies[-2]["messages"] == bodies[-1]["messages"] == talk
            params = SamplingParams(max_tokens=40, seed=7, temperature=0.8)
            talk.append({"role": "assistant", "content": llm.chat(talk, params, use_tqdm=False)[0].outputs[0].text})
            assert page.input_value("#prompt") == ""
        texts = [each.partition("\n")[2].strip() for each in page.locator("#turns li:visible").all_inner_texts()]
        assert texts == [message["content"].strip() for message in talk[:-1]]
        asked(page, "No", **{"f-temperature": "-1"})  # a refused message leaves no trace
        page.wait_for_selector("#alert:not([hidden])")
        assert page.input_value("#prompt") == "No"
        assert page.locator("#turns li:visible").count() == 4
        asked(page, "Yes")
        finished(page)
        assert bodies[-1]["messages"] == [*talk, {"role": "user", "content": "Yes"}]
        page.uncheck("#chat")
        assert page.is_hidden("#talk")
        asked(page)
        finished(page)
        assert bodies[-1]["prompt"] == "Once upon a time"
        page.check("#chat")
        page.click("#anew")
        assert page.is_hidden("#talk")
        asked(page, "Hi")
        finished(page)
        assert bodies[-1]["messages"] == [{"role": "user", "content": "Hi"}]


@pytest.mark.full
def test_stopping_a_run_cancels_its_requests(page: Any, server: Running) -> None:
    asked(page, **{"f-max_tokens": "400", "f-other": '{"ignore_eos": true}'})
    page.wait_for_selector("#lane-drafted .tok")
    page.keyboard.press("Escape")
    page.wait_for_selector("#verdict:text-is('Stopped.')")
    until(lambda: not server.llm.engine.has_work)
    assert page.is_enabled("#run")


def answered(page: Any, change: Any) -> None:
    """Change the body of every stream on its way to the page; `change` gets each chunk's draft."""

    def handle(route: Any) -> None:
        response = route.fetch()
        lines = []
        for line in response.text().splitlines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                for choice in chunk["choices"]:
                    change(choice["draft"], route.request.post_data_json)
                line = "data: " + json.dumps(chunk)
            lines.append(line)
        route.fulfill(response=response, body="\n".join(lines) + "\n")

    page.route("**/v1/completions", handle)


def test_a_difference_between_the_answers_is_reported(page: Any) -> None:
    def other(draft: dict[str, Any], body: dict[str, Any]) -> None:
        for number, token in enumerate(draft["tokens"]):
            if body["speculation"] is False and draft["first"] + number == 5:
                token["id"] += 1

    answered(page, other)
    asked(page)
    assert finished(page).startswith("Token 6 differs from plain decoding")
    for name in ("drafted", "plain"):  # whose tokens all came at once
        page.locator(f"#lane-{name} .speed", has_text="tokens/s").wait_for()
        assert f"{name.title()}: " in page.get_attribute("#chart-speed", "aria-label")


def test_text_of_answers_is_never_rendered_as_markup(page: Any) -> None:
    def evil(draft: dict[str, Any], body: dict[str, Any]) -> None:
        for each in (*draft["segments"], *draft["guesses"], *draft["tokens"]):
            each["text"] = EVIL
        draft["drafter"] = EVIL

    answered(page, evil)
    asked(page)
    finished(page)
    page.locator("#lane-drafted .tok.drafted").first.hover()
    assert EVIL in page.inner_text("#tip")
    assert page.locator("main img, .tip img").count() == 0
    assert page.title() == "forerun"


@pytest.mark.short("f-depth-*")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("f-temperature", "-1", "temperature"),
        ("f-stop_token_ids", "1,x", "use token ids separated by commas"),
        ("f-logit_bias", "[1]", "this is not a JSON object"),
        ("f-depth", "deep", "use auto or a whole number"),
        ("f-other", '{"temprature": 1}', "did you mean 'temperature'"),
    ],
)
def test_a_refused_field_is_named_on_the_page(page: Any, field: str, value: str, message: str) -> None:
    asked(page, **{field: value})
    page.wait_for_selector("#alert:not([hidden])")
    assert message in page.inner_text("#alert")
    assert page.is_enabled("#run")


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_and_both_themes(browser: Any, server: Running, scheme: str) -> None:
    options = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme, "reduced_motion": "reduce"}
    with opened(browser, server, **options) as page:
        asked(page)
        finished(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        shade = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(shade)
        page.select_option("#theme", "dark" if scheme == "light" else "light")
        assert page.evaluate(shade) != before
        page.reload()
        page.wait_for_selector("#f-seed")
        assert page.evaluate(shade) != before
        unnamed = """[...document.querySelectorAll('input, select, textarea, button')]
            .filter((e) => !e.labels?.length && !e.textContent.trim()).map((e) => e.id)"""
        assert page.evaluate(unnamed) == []


@pytest.mark.full
def test_a_server_with_keys_asks_for_one(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me secret\n")
    keys.chmod(0o600)
    with drafting() as llm, running(llm, api_keys=keys) as own, opened(browser, own) as page:
        page.wait_for_selector("#key-card:not([hidden])")
        assert page.is_disabled("#run")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#alert:not([hidden])")
        page.fill("#key", "secret")
        page.click("#key-use")
        asked(page)
        assert "The same 40 tokens" in finished(page)
        assert page.evaluate("JSON.stringify(localStorage) + document.cookie").find("secret") < 0
