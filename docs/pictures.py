"""Take the pictures of docs/page.md again, of an endpoint over the embedded corpus.

    openbook up
    python docs/pictures.py http://127.0.0.1:8000/

in a Chromium with the fonts Inter and Noto (Debian: fonts-inter, fonts-noto-core).
"""

import io
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

FOLDER = Path(__file__).parent
WIDE, NARROW = {"width": 1280, "height": 830}, {"width": 390, "height": 844}
TELEPHONE = {"viewport": NARROW, "has_touch": True, "is_mobile": True}
MONGOLS = {"question": "Who led the Mongol empire?", "formulation": "token"}
TEAM = {"question": "Which NFL team represented the AFC at Super Bowl 50?"}
LABELS = {**TEAM, "labels": "Denver Broncos\nNew England Patriots\nCarolina Panthers"}


def opened(browser: Browser, url: str, asked: dict[str, str], **options: Any) -> Page:
    page = browser.new_page(reduced_motion="reduce", **{"viewport": WIDE, **options})
    page.goto(f"{url}#{urlencode(asked)}")
    page.evaluate("document.body.style.webkitTapHighlightColor = 'transparent'")  # else a tap is seen as a flash
    settled(page)
    return page


def settled(page: Page) -> None:
    expect(page.locator("#numbers")).to_be_visible()
    expect(page.locator("body")).not_to_have_class(re.compile("busy"))
    page.wait_for_function("document.fonts.status === 'loaded'")


def keep(page: Page, name: str) -> None:
    """With a palette, which is a third of the bytes. MAXCOVERAGE: of a passage's hue there may be a dot alone."""
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    few = image.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(FOLDER / f"page-{name}.png", optimize=True)
    page.context.close()


def take(browser: Browser, url: str) -> None:
    opened(browser, url, MONGOLS).context.close()  # the first is slower than all that follow

    page = opened(browser, url, MONGOLS)
    page.locator("#words [data-word='1']").hover()
    keep(page, "wide")

    page = opened(browser, url, LABELS, viewport={"width": 1280, "height": 675})
    page.get_by_text("How it answers").click()
    keep(page, "fields")

    page = opened(browser, url, TEAM, color_scheme="dark", viewport={"width": 1280, "height": 900})
    best = page.locator(".card", has=page.locator("mark")).first
    best.get_by_role("switch").uncheck()
    expect(page.locator("#before")).to_be_visible()
    settled(page)
    page.mouse.move(1, 1)
    page.evaluate("scrollTo(0, 0)")
    keep(page, "compared")

    page = opened(browser, url, MONGOLS, **TELEPHONE)
    page.locator("#words [data-word='1']").tap()
    keep(page, "narrow")

    page = opened(browser, url, MONGOLS, color_scheme="dark", **TELEPHONE)
    page.locator(".card .chip").nth(1).tap()
    page.locator(".passages").evaluate("node => node.scrollIntoView()")
    keep(page, "narrow-dark")


if __name__ == "__main__":
    expect.set_options(timeout=60_000)
    found = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))))
    with sync_playwright() as playwright:
        take(playwright.chromium.launch(executable_path=found, args=["--no-sandbox"]), sys.argv[1])
