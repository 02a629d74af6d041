"""The chat page in a headless Chromium: what a user sees and can do.

Needs a Chromium with its driver (Debian: `apt-get install chromium chromium-driver`).
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, StreamingResponse
from serving_cases import running, serving

webdriver = pytest.importorskip("selenium.webdriver", reason="needs the extra slow (selenium)")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from kangaroo.serving.answers import server_sent_event  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,  # a browser takes seconds to start
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="needs a browser: apt-get install chromium chromium-driver",
    ),
]
GREEN = f"rgba({0x21}, {0x7A}, {0x35}"
ATTACK = (
    "<img src=x onerror='document.title=\"owned\"'><b>bold</b><script>document.title=1</script>"
)
ALLOWED = {"href", "target", "rel", "start", "class"}


class Page:
    def __init__(self, driver: Any, address: str):
        self.driver = driver
        driver.get(address)
        driver.execute_script("sessionStorage.clear()")
        driver.refresh()

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def texts(self, css: str) -> list[str]:
        return [element.get_property("textContent") for element in self.all(css)]

    def until(self, true: Callable[[], object]) -> None:
        WebDriverWait(self.driver, 60, 0.05).until(lambda _: true())

    def ask(self, text: str) -> None:
        """Send it, and wait for the end of the answer."""
        self.one("#text").send_keys(text + Keys.ENTER)
        self.until(
            lambda: self.one("#send").text == "Send" and not self.one("#hint").is_displayed()
        )


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.add_argument("--window-size=900,1000")
    service = webdriver.ChromeService(executable_path=DRIVER)
    browser = webdriver.Chrome(options=options, service=service)
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """With room for two answers, which have up to 512 tokens."""
    with serving(longest=2000) as where:
        yield where


def test_an_answer_streams_with_accepted_tokens_in_green_and_its_speed(driver, address):
    page = Page(driver, address)
    page.until(lambda: page.one("#model").text == "tiny, drafter kangaroo")
    page.ask("Why?")
    assert page.texts(".user") == ["Why?"] and not page.all(".error")
    green = [element for element in page.all(".assistant .drafted")]
    assert green and page.texts(".assistant")[0]
    assert green[0].value_of_css_property("color").startswith(GREEN)
    counted = page.texts(".counts")[0].split()
    assert counted[1:2] == ["tokens,"] and counted[3] == "tokens/s,"
    assert int(counted[0]) > 1 and float(counted[2]) > 0
    assert counted[4:6] == ["compression", "rate"] and float(counted[6]) > 1


def test_a_second_turn_is_answered_and_a_new_chat_begins_anew(driver, address):
    page = Page(driver, address)
    page.ask("One")
    page.ask("Two")
    assert page.texts(".user") == ["One", "Two"] and not page.texts(".error")
    first, second = page.texts(".assistant")
    assert first and second and first != second
    page.one("#anew").click()
    assert not page.all(".turn") and page.one("#hint").is_displayed()
    page.ask("One")
    assert page.texts(".assistant") == [first]  # greedy, so it knows nothing of what was said


def test_what_the_server_refuses_is_shown_in_words_and_can_be_sent_again(driver, address):
    page = Page(driver, address)
    page.driver.execute_script("document.getElementById('text').value = 'x'.repeat(5000)")
    page.ask("")
    (error,) = page.texts(".error")
    assert error.startswith("the prompt has ") and "Shorten the prompt" in error
    assert page.texts(".user") == [] and len(page.one("#text").get_property("value")) == 5000


def test_a_server_that_asks_for_its_key_gets_it(driver):
    with serving(api_key="secret") as address:
        page = Page(driver, address)
        page.until(lambda: page.one("#key-form").is_displayed())
        assert "send the server's key" in page.one("#model").text
        page.one("#key").send_keys("wrong" + Keys.ENTER)
        page.until(lambda: "send the server's key" in page.one("#model").text)
        assert page.one("#key-form").is_displayed()
        page.one("#key").clear()
        page.one("#key").send_keys("secret" + Keys.ENTER)
        page.until(lambda: page.one("#model").text == "tiny, drafter kangaroo")
        assert not page.one("#key-form").is_displayed()
        page.ask("Why?")
        assert page.texts(".assistant")[0] and not page.all(".error")
        page.driver.refresh()  # the tab remembers it
        page.until(lambda: page.one("#model").text == "tiny, drafter kangaroo")


class StandIn:
    """A server whose answers a test chooses, and which keeps what it was sent."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, int]] = []  # text, and how many of its characters were drafted
        self.error, self.ends = "", True
        self.bodies: list[dict[str, Any]] = []
        self.go = threading.Event()
        self.go.set()

    def stream(self) -> Iterator[str]:
        for i, (text, drafted) in enumerate(self.parts, start=1):
            choice = {"index": 0, "delta": {"content": text}, "drafted": drafted}
            usage = {"completion_tokens": 3 * i, "rounds": 2 * i}
            yield server_sent_event({"choices": [choice], "usage": usage})
            self.go.wait(30)
        if self.error:
            yield server_sent_event({"error": {"message": self.error}})
        elif self.ends:
            yield "data: [DONE]\n\n"

    def turns(self, number: int) -> list[tuple[str, str]]:
        return [(turn["role"], turn["content"]) for turn in self.bodies[number]["messages"]]


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def page(driver, stand_in) -> Iterator[Page]:
    app, html = FastAPI(), (resources.files("kangaroo.serving") / "page.html").read_text()
    app.get("/", response_class=HTMLResponse)(lambda: html)
    app.get("/v1/models")(lambda: {"data": [{"id": ATTACK, "drafter": "d"}]})

    @app.post("/v1/chat/completions")
    def chat(body: dict[str, Any]) -> StreamingResponse:
        stand_in.bodies.append(body)
        return StreamingResponse(stand_in.stream())

    with running(app) as address:
        yield Page(driver, address)


def test_nothing_that_is_said_is_taken_for_html(page, stand_in):
    stand_in.parts, stand_in.error = [(ATTACK, 5)], ATTACK
    page.ask(ATTACK)
    for css in (".user", ".assistant", ".error"):
        assert page.texts(css) == [ATTACK]
    assert ATTACK in page.one("#model").text
    assert page.driver.title == "Kangaroo" and not page.all("img") and not page.all("b")


MARKDOWN = {  # and what of HTML it becomes
    "a **b *c*** _e_ `f*g*` \\*h\\*": "<p>a <strong>b <em>c</em></strong> <em>e</em> "
    "<code>f*g*</code> *h*</p>",
    "2 * 3 * 4, snake_case_name, __init__.py, **open": "<p>2 * 3 * 4, snake_case_name, "
    "__init__.py, **open</p>",
    "# One\ntext\n## Two ##\n\nmore\nlines": "<h2>One</h2><p>text</p><h3>Two</h3>"
    "<p>more\nlines</p>",
    "```python\nif a < b:\n\n    **c**\n```\nd": "<pre><code>if a &lt; b:\n\n    **c**</code></pre>"
    "<p>d</p>",
    "~~~\nnot closed": "<pre><code>not closed</code></pre>",
    "- a\n- b\n  1. c\n\n  2. d\n\ne": '<ul><li><p>a</p></li><li><p>b</p><ol start="1"><li><p>c'
    "</p></li><li><p>d</p></li></ol></li></ul><p>e</p>",
    "3. a\n   ```\n   b\n   ```\n4. c": '<ol start="3"><li><p>a</p><pre><code>b</code></pre></li>'
    "<li><p>c</p></li></ol>",
    "> a\n> - b\n\n---": "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote><hr>",
    "|a|b|\n|---|:-:|\n|`c`|d \\| e|\nf": "<table><tr><th>a</th><th>b</th></tr><tr><td>"
    "<code>c</code></td><td>d | e</td></tr></table><p>f</p>",
    "[*a*](https://b.c/d?e=f#g) [h](ftp://i)": '<p><a href="https://b.c/d?e=f#g" target="_blank" '
    'rel="noopener noreferrer"><em>a</em></a> [h](ftp://i)</p>',
    "> " * 40 + "- " * 40 + "*_`[(" * 60: None,
}


@pytest.mark.parametrize("text", MARKDOWN)
def test_markdown_becomes_elements(page, stand_in, text):
    stand_in.parts = [(part, 0) for part in text]  # as it is streamed, cut everywhere
    page.ask("Why?")
    html = page.one(".assistant").get_property("innerHTML")
    assert not page.all(".error") and MARKDOWN[text] in (None, html)


@pytest.mark.parametrize(
    "text",
    [
        f"# {ATTACK}\n**{ATTACK}**\n- {ATTACK}\n\n> {ATTACK}\n\n`{ATTACK}`",
        f"|{ATTACK}|\n|-|\n|{ATTACK}|",
        f"```<script>\n{ATTACK}\n```\n[{ATTACK}](https://a.b)",
        "[a](javascript:document.title=1) [a]( javascript:1) [a](JaVaScRiPt:1)",
        "[a](data:text/html,x) [a](//b.c) [a](vbscript:1)",
        "[a](java\nscript:1) ![a](javascript:1) <javascript:1>",
        '[a](https://b.c"onmouseover="document.title=1) [a](https://b.c\'onclick=1)',
        "[a](https://b.c/<img src=x onerror=document.title=1>) ![a](https://b.c/track.png)",
        "[a [b](javascript:1)](https://c.d) [a](https://b.c)](javascript:1)",
        "<a href='javascript:document.title=1'>a</a><svg onload=document.title=1><style>",
    ],
)
def test_no_markdown_carries_code_or_other_addresses_than_of_the_web(page, stand_in, text):
    stand_in.parts = [(text[:20], 20), (text[20:], 0)]
    page.ask("Why?")
    for element in page.all(".assistant *"):
        kind, names = page.driver.execute_script(
            "return [arguments[0].localName, arguments[0].getAttributeNames()]", element
        )
        assert kind not in ("img", "script", "svg", "style", "b") and set(names) <= ALLOWED
        if kind == "a":
            assert element.get_property("protocol") in ("http:", "https:")
            element.click()
    for window in page.driver.window_handles[1:]:
        page.driver.switch_to.window(window)
        page.driver.close()
    page.driver.switch_to.window(page.driver.window_handles[0])
    assert page.driver.title == "Kangaroo" and len(page.texts(".assistant")) == 1


def test_what_was_drafted_is_green_to_the_character(page, stand_in):
    stand_in.parts = [("a🦘b", 2), ("c", 0), ("\u0928\u093fd", 3)]
    page.ask("Why?")
    assert page.texts(".assistant .drafted") == ["a🦘", "\u0928\u093fd"]
    assert page.texts(".assistant") == ["a🦘bc\u0928\u093fd"]
    assert page.texts(".counts")[0].startswith("9 tokens, ")
    assert page.texts(".counts")[0].endswith(" compression rate 1.50")


def test_a_stop_keeps_what_was_said(page, stand_in):
    stand_in.parts = [("half of", 0), ("it", 0)]
    stand_in.go.clear()
    page.one("#text").send_keys("One" + Keys.ENTER)
    page.until(lambda: page.texts(".assistant") == ["half of"])
    page.one("#send").click()
    page.until(lambda: page.texts(".error") == ["stopped"])
    stand_in.go.set()
    page.ask("Two")
    assert [content for _, content in stand_in.turns(1)] == ["One", "half of", "Two"]


def test_an_answer_that_breaks_off_is_no_whole_one(page, stand_in):
    stand_in.parts, stand_in.ends = [("half of", 0)], False
    page.ask("One")
    assert page.texts(".error") == ["the answer has ended too early."]
