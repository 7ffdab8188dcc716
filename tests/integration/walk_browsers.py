"""The page at `/` in Firefox and in WebKit, Safari's engine: what test_page.py holds in Chromium, walked in short.

    make walk-browsers

WebDriver drives both. A browser that is not there is left out; pictures of those that are come to var/browsers.
"""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
import scripted_page
from scripted_page import Endpoint
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait
from test_page import AXE, QUESTION, answer_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:selenium")

PICTURES = Path(__file__).parents[2] / "var/browsers"
DRIVERS = {"firefox": "firefox", "webkit": "WebKitWebDriver"}
FAULTS = """
window.faults = [];
for (const name of ["error", "unhandledrejection", "securitypolicyviolation"])
  addEventListener(name, (event) => faults.push(`${event.message ?? event.reason ?? event.violatedDirective}`));
"""
PAPER, DARK = "rgb(251, 249, 244)", "rgb(19, 20, 23)"


@contextmanager
def started(name: str, folder: Path, dark: bool = False) -> Iterator[WebDriver]:
    """A browser of a person who likes it dark or bright, with a window that can be as narrow as a telephone."""
    if name == "firefox":
        options = webdriver.FirefoxOptions()
        options.set_preference("ui.systemUsesDarkTheme", int(dark))
        for argument in ("-headless", "-remote-allow-system-access"):
            options.add_argument(argument)
        driver = webdriver.Firefox(options)
        with driver.context("chrome"):
            driver.execute_script("document.documentElement.style.setProperty('min-width', 0, 'important')")
    else:
        (folder / "gtk-3.0").mkdir(exist_ok=True)
        (folder / "gtk-3.0/gtk.css").write_text("* { margin: 0; padding: 0; min-width: 0; font-size: 1px; }")
        os.environ |= {"XDG_CONFIG_HOME": str(folder), "GTK_THEME": "Adwaita:dark" if dark else "Adwaita"}
        driver = webdriver.WebKitGTK()
    try:
        yield driver
    finally:
        driver.quit()


class Reader:
    """A person before a browser."""

    def __init__(self, driver: WebDriver, url: str) -> None:
        self.driver, self._url = driver, url

    def open(self, width: int = 1280, fragment: str = "", question: str = "") -> None:
        self.driver.set_window_size(width, 900)
        self.driver.get("about:blank")  # another fragment alone would not load the page again
        self.driver.get(self._url + fragment)
        self.driver.execute_script(FAULTS)
        if question:
            self.write("question", question)
            self.press("#submit")
        self.settled()

    def faults(self) -> list[str]:
        return list(self.driver.execute_script("return window.faults ?? []"))

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """At one moment: nodes that were found before may be gone when they are asked."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText.trim())"
        return list(self.driver.execute_script(script, selector))

    def until(self, fact: Callable[[], object]) -> None:
        WebDriverWait(self.driver, 20, 0.05).until(lambda _: fact(), fact)  # type: ignore[arg-type]

    def settled(self) -> None:
        self.until(lambda: not self.all("body.busy"))

    def press(self, selector: str) -> None:
        self.all(selector)[0].click()

    def write(self, name: str, text: str) -> None:
        box = self.all(f"[name={name}]")[0]
        box.clear()
        if text:
            box.send_keys(text)

    def point(self, selector: str) -> None:
        ActionChains(self.driver).move_to_element(self.all(selector)[0]).perform()

    def keys(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def tab_to(self, selector: str) -> None:
        for _ in range(40):
            self.keys(Keys.TAB)
            if self.has_focus(selector):
                return
        raise AssertionError(f"no {selector} is reached")

    def has_focus(self, selector: str) -> bool:
        return bool(self.driver.execute_script("return document.activeElement.matches(arguments[0])", selector))

    def style(self, selector: str, name: str) -> str:
        node = self.all(selector)[0]
        return str(self.driver.execute_script("return getComputedStyle(arguments[0])[arguments[1]]", node, name))

    def lit(self) -> dict[str, float]:
        """How far each passage is lit, by title."""
        lit = "return arguments[0].style.getPropertyValue('--lit')"
        return {
            card.find_element("css selector", "h3").text: float(self.driver.execute_script(lit, card))
            for card in self.all(".card")
        }

    def accessible(self) -> None:
        self.driver.execute_script(AXE)
        found = self.driver.execute_async_script("axe.run().then((found) => arguments[0](found.violations))")
        assert [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found] == []

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(PICTURES / f"{name}.png"))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with scripted_page.served() as endpoint:
        yield endpoint


@pytest.fixture(scope="module", params=DRIVERS)
def name(request: pytest.FixtureRequest) -> str:
    if not shutil.which(DRIVERS[request.param]):
        pytest.skip(f"there is no {DRIVERS[request.param]}")
    return str(request.param)


@pytest.fixture(scope="module")
def driver(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with started(name, tmp_path_factory.mktemp("settings")) as driver:
        print(f"\n{driver.capabilities['browserName']} {driver.capabilities['browserVersion']}")
        yield driver


@pytest.fixture
def reader(driver: WebDriver, endpoint: Endpoint) -> Iterator[Reader]:
    reader = Reader(driver, endpoint.url)
    yield reader
    assert reader.faults() == []


def test_an_answer_comes_word_by_word(reader: Reader, endpoint: Endpoint) -> None:
    reader.open()
    reader.write("question", f"slowly: {QUESTION}")
    reader.keys(Keys.ENTER)
    reader.until(lambda: reader.texts("#status") == ["Reading 3 passages …"])
    for n, word in enumerate(["Alexander", "Graham", "Bell"], start=1):
        endpoint.step()
        reader.until(lambda n=n, word=word: reader.texts("#words [data-word]")[n - 1 :] == [word])
    reader.settled()
    assert len(reader.all("#words sup")) == 1, "what stands in a passage is cited"
    assert reader.style("mark", "textDecorationLine") == "underline"
    assert reader.style("mark", "textDecorationColor") == reader.style(".card:first-child .chip", "backgroundColor")


def test_a_word_that_is_pointed_at_lights_its_passages(reader: Reader, endpoint: Endpoint, name: str) -> None:
    reader.open(question=QUESTION)
    answer = answer_of(endpoint, question=QUESTION)
    reader.point("[data-word='2']")
    reader.until(lambda: "“Bell” rests on" in reader.texts("#rests-title")[0])
    titles = [evidence["passage"]["title"] for evidence in answer["evidence"]]
    assert reader.lit() == pytest.approx(
        dict(zip(titles, map(math.exp, answer["tokens"][2]["log_posterior"]), strict=True)), abs=1e-6
    )
    assert len(reader.all("#threads path")) == 3
    reader.picture(f"{name}-wide")
    reader.point(".card .text")
    reader.until(lambda: reader.all("#words.shares"))
    reader.point(".mark")
    reader.until(lambda: reader.texts("#rests-title") == ["The answer rests on"])
    reader.press("[data-word='1']")
    reader.point(".mark")
    assert "“Graham”" in reader.texts("#rests-title")[0], "a click holds it"


def test_a_passage_is_switched_off_and_one_of_ones_own_added(reader: Reader, endpoint: Endpoint) -> None:
    reader.open(question=QUESTION)
    reader.press(".card .switch")
    reader.settled()
    assert reader.texts("#found") == ["3 read, 1 left out"]
    assert len(endpoint.doors.requests[-1]["without"]) == 1
    assert re.match(r"without passage 1", reader.texts("#before li")[0])
    reader.press("#add summary")
    reader.write("title", "Mine")
    reader.write("text", "Who invented the telephone? Antonio Meucci, says this <b>passage</b>.")
    reader.press("#own button")
    reader.settled()
    assert reader.texts("#found") == ["4 read, 1 left out"]
    assert "Antonio Meucci, says this <b>passage</b>." in reader.texts(".card .text")[0]
    assert [len(endpoint.doors.requests[-1][each]) for each in ("without", "passages")] == [1, 1]
    reader.accessible()
    reader.driver.back()
    reader.until(lambda: reader.texts("#found") == ["3 read, 1 left out"])
    reader.driver.refresh()
    reader.settled()
    assert "passages" not in endpoint.doors.requests[-1], "a link asks for what it asked for"


def test_labels_and_passages_looked_for_again(reader: Reader, endpoint: Endpoint, name: str) -> None:
    reader.open(question=QUESTION)
    reader.press("#how summary")
    reader.write("labels", f"Antonio Meucci{Keys.ENTER}{Keys.ENTER}Alexander Graham Bell")
    reader.press(".fields button")
    reader.settled()
    assert endpoint.doors.requests[-1]["labels"] == ["Antonio Meucci", "Alexander Graham Bell"]
    assert len(reader.all("#answers li")) == 2
    reader.picture(f"{name}-labels")
    reader.write("labels", "")
    reader.write("follow", "1")
    reader.press(".fields button")
    reader.settled()
    assert "follow" in reader.texts("[role=alert]")[0]
    assert reader.has_focus("[name=follow][aria-invalid]")
    reader.press("[name=formulation] [value=token]")
    reader.write("n_beams", "1")
    reader.press(".fields button")
    reader.settled()
    assert endpoint.doors.requests[-1]["follow"] == 1
    assert len(reader.all(".card")) > 3, "more than were found at first"


def test_everything_can_be_done_with_a_keyboard(reader: Reader) -> None:
    reader.open()
    assert reader.has_focus("#question")
    reader.keys(QUESTION, Keys.ENTER)
    reader.until(lambda: reader.all(".card"))
    reader.settled()
    reader.tab_to("[data-word='0']")
    reader.keys(Keys.ARROW_RIGHT)
    assert "“Graham”" in reader.texts("#rests-title")[0]
    reader.keys(Keys.ENTER)
    assert reader.all("[data-word='1'][aria-pressed=true]")
    reader.keys(Keys.ESCAPE)
    assert reader.all("[data-word='1'][aria-pressed=false]")
    reader.tab_to(".card .chip")
    assert reader.style(":focus", "outlineStyle") == "solid"
    reader.keys(Keys.TAB, Keys.SPACE)
    reader.until(lambda: reader.all(".card.off"))
    reader.settled()
    assert reader.has_focus(".card.off [role=switch]"), "the focus stays"


def test_nothing_is_wider_than_a_small_screen(reader: Reader, name: str) -> None:
    reader.open(width=320, question=QUESTION)
    assert reader.driver.execute_script("return innerWidth") == 320
    reader.picture(f"{name}-narrow")
    reader.driver.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
    wide = "const { scrollWidth, clientWidth } = document.documentElement; return scrollWidth - clientWidth"
    assert reader.driver.execute_script(wide) == 0
    assert reader.style("#threads", "display") == "none"
    reader.accessible()


def test_a_long_question_is_seen_whole(reader: Reader) -> None:
    reader.open(width=320)
    one = reader.all("#question")[0].size["height"]
    reader.write("question", "Which of the two who are named invented the telephone, and in which year was it?")
    box = reader.all("#question")[0]
    assert box.size["height"] > 2 * one
    assert reader.driver.execute_script("return arguments[0].scrollHeight - arguments[0].clientHeight", box) <= 1


def test_what_goes_wrong_is_said(reader: Reader, endpoint: Endpoint) -> None:
    reader.open(question="busy")
    assert reader.texts("[role=alert] h2") == ["Too many questions at the moment"]
    reader.open()
    reader.write("question", "slowly broken")
    reader.keys(Keys.ENTER)
    endpoint.step()
    reader.until(lambda: reader.texts("#words [data-word]") == ["Alexander"])
    endpoint.step()
    reader.until(lambda: reader.texts("[role=alert] h2") == ["The connection broke off"])


def test_the_theme_is_that_of_the_browser(reader: Reader, name: str, endpoint: Endpoint, tmp_path: Path) -> None:
    reader.open()
    assert reader.style("html", "backgroundColor") == PAPER
    with started(name, tmp_path, dark=True) as driver:
        other = Reader(driver, endpoint.url)
        other.open(fragment=f"#question={quote(QUESTION)}")
        assert other.style("html", "backgroundColor") == DARK
        other.accessible()
        other.picture(f"{name}-dark")
        assert other.faults() == []
