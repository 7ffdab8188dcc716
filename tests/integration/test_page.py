"""The page at `/` in a real browser, before the real application: what people see, press and hear, what may not run."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import scripted_page
from playwright.sync_api import Browser, Error, Locator, Page, Route, expect, sync_playwright
from scripted_page import HOSTILE, KEY, PASSAGES, Endpoint

from openbook.serving.endpoint.page import FOLDER

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first opens pages three times as fast as the others."""
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
QUESTION = "who invented the telephone?"
AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with scripted_page.served() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.fail(f"the page is tested in Chromium, and there is none of {', '.join(BROWSERS)}: see the Makefile")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, endpoint: Endpoint) -> Iterator[Open]:
    """Opens the page, with a question if one is given. The browser, and the policy it was told, may find no fault."""
    contexts, said = [], []

    def opened(question: str = "", fragment: str = "", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.goto(endpoint.url + fragment)
        if question:
            ask(page, question)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [each for each in said if "Failed to load resource" not in each] == []  # a refused question is no fault


@pytest.fixture
def publish(endpoint: Endpoint) -> Iterator[Callable[[], None]]:
    """Publishes the same passages in another order: each has another id."""
    yield lambda: endpoint.publish(PASSAGES[::-1], "later")
    endpoint.publish(PASSAGES, "exact")


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.get_by_role("button", name="Ask", exact=True).click()
    settled(page)


def settled(page: Page) -> None:
    expect(page.locator("body")).not_to_have_class(re.compile("busy"))


def add(page: Page, text: str) -> None:
    page.get_by_text("Add one of your own").click()
    page.get_by_label("Text").fill(text)
    page.get_by_role("button", name="Add it, ask again").click()


def named(page: Page, says: str, label: str) -> Locator:
    """The field of which the page says that it is wrong."""
    expect(page.get_by_role("alert")).to_contain_text(says)
    box = page.get_by_label(re.compile(f"^{label}"))
    expect(box).to_be_focused()
    expect(box).to_have_attribute("aria-invalid", "true")
    return box


def words(page: Page) -> list[str]:
    return page.locator("#words [data-word]").all_inner_texts()


def numbers(page: Page) -> dict[str, str]:
    """By title."""
    titles, chips = (page.locator(each).all_inner_texts() for each in (".card h3", ".card .chip"))
    return dict(zip(titles, chips, strict=True))


def card(page: Page, title: str) -> Any:
    return page.locator(".card", has=page.locator("h3", has_text=re.compile(f"^{re.escape(title)}$")))


def lit(card: Any) -> float:
    return float(card.evaluate("node => node.style.getPropertyValue('--lit')"))


def answer_of(endpoint: Endpoint, **asked: Any) -> Any:
    return httpx.post(f"{endpoint.url}v1/answer", json={"tokens": True, **asked}, trust_env=False).json()


def percent(log: float) -> float:
    return 100 * math.exp(log)


def shown(text: str) -> float:
    return float(re.sub(r"[<>%]", "", text))


def accessible(page: Page) -> None:
    """No rule of axe is broken; those of colours, in no theme."""
    page.evaluate(f"() => {{ if (!window.axe) {{ {AXE} }} }}")
    for theme, rules in (("light", None), ("dark", ["color-contrast", "link-in-text-block"])):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
        found = page.evaluate("(rules) => axe.run(rules ? {runOnly: rules} : {})", rules)["violations"]
        told = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]
        assert told == [], theme


# --- asked and answered


def test_an_answer_comes_word_by_word_after_its_passages(opened: Open, endpoint: Endpoint) -> None:
    page = opened()
    page.get_by_label("Your question").fill(f"slowly: {QUESTION}")
    page.keyboard.press("Enter")
    expect(page.locator(".card")).to_have_count(3)
    expect(page.locator("#status")).to_have_text("Reading 3 passages …")
    expect(page.locator("#rests-title")).to_have_text("Found, and being read")
    accessible(page)
    for n, word in enumerate(["Alexander", "Graham", "Bell"], start=1):
        endpoint.step()
        expect(page.locator("#words [data-word]")).to_have_count(n)
        assert words(page)[-1] == word
    settled(page)
    expect(page.locator("#status")).to_have_text(
        re.compile(
            r"^Answer: Alexander Graham Bell\. Probability \d+%\. It rests on passage \d, “\w[\w ]+”, to \d+%\.$"
        )
    )
    assert page.title() == f"slowly: {QUESTION} · openbook"


def test_stop_leaves_what_has_come(opened: Open, endpoint: Endpoint) -> None:
    page = opened()
    page.get_by_label("Your question").fill(f"slowly: {QUESTION}")
    page.keyboard.press("Enter")
    endpoint.step()
    expect(page.locator("#words [data-word]")).to_have_count(1)
    page.get_by_role("button", name="Stop").click()
    settled(page)
    assert words(page) == ["Alexander"]
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator(".caret")).to_have_count(0)


def test_passages_whose_reading_was_stopped_are_not_said_to_be_read(opened: Open) -> None:
    page = opened()
    page.get_by_label("Your question").fill(f"slowly: {QUESTION}")
    page.keyboard.press("Enter")
    expect(page.locator("#rests-title")).to_have_text("Found, and being read")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#rests-title")).to_have_text("Found")


def test_all_numbers_are_those_of_the_endpoint(opened: Open, endpoint: Endpoint) -> None:
    page = opened(QUESTION)
    answer = answer_of(endpoint, question=QUESTION)
    page.get_by_text("All numbers").click()
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#table tbody tr").all()]
    expected = [
        [each["log_prior"] for each in answer["evidence"]],
        *(token["log_posterior"] for token in answer["tokens"]),
        [each["log_posterior"] for each in answer["evidence"]],
    ]
    for row, logs in zip(rows, expected, strict=True):
        assert list(map(shown, row[1:])) == pytest.approx(list(map(percent, logs)), abs=0.51)
    assert shown(rows[-1][0]) == pytest.approx(percent(answer["log_likelihood"]), abs=0.51)
    expect(page.locator("#sure")).to_contain_text(f"log −{-answer['log_likelihood']:.3f}")
    expect(page.locator("#time-legend")).to_contain_text(re.compile("encode .*search .*fetch .*generate"))
    accessible(page)


# --- pointed at


@pytest.mark.parametrize("formulation", ["sequence", "token"])
def test_a_word_that_is_pointed_at_lights_its_passages(opened: Open, endpoint: Endpoint, formulation: str) -> None:
    page = opened(fragment=f"#question={quote(QUESTION)}&formulation={formulation}")
    settled(page)
    answer = answer_of(endpoint, question=QUESTION, formulation=formulation)
    page.locator("#words [data-word='2']").hover()
    expect(page.locator("#rests-title")).to_contain_text("“Bell” rests on")
    for evidence, log in zip(answer["evidence"], answer["tokens"][2]["log_posterior"], strict=True):
        assert lit(card(page, evidence["passage"]["title"])) == pytest.approx(math.exp(log), abs=1e-6)
    expect(page.locator("#threads path")).to_have_count(3)
    page.mouse.move(1, 1)
    expect(page.locator("#rests-title")).to_have_text("The answer rests on")
    assert [lit(each) for each in page.locator(".card").all()] == [0, 0, 0]


def test_a_passage_that_is_pointed_at_lights_its_words(opened: Open, endpoint: Endpoint) -> None:
    page = opened(QUESTION)
    answer = answer_of(endpoint, question=QUESTION)
    card(page, "The telephone").locator(".text").hover()
    place = [each["passage"]["title"] for each in answer["evidence"]].index("The telephone")
    for i, token in enumerate(answer["tokens"]):
        word = page.locator(f"#words [data-word='{i}']")
        assert lit(word) == pytest.approx(math.exp(token["log_posterior"][place]), abs=1e-6)
        assert shown(str(word.get_attribute("data-share"))) == pytest.approx(
            percent(token["log_posterior"][place]), abs=0.51
        )
    accessible(page)


def test_a_finger_holds_what_it_taps(opened: Open) -> None:
    page = opened(QUESTION, viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    word = page.locator("#words [data-word='1']")
    word.tap()
    expect(word).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#rests-title")).to_contain_text("“Graham”")
    word.tap()
    expect(page.locator("#rests-title")).to_have_text("The answer rests on")
    page.locator("#rests button").first.tap()
    expect(page.locator("#words")).to_have_class(re.compile("shares"))


# --- what if


def test_a_passage_is_switched_off_and_on_beside_the_answer_before(opened: Open, endpoint: Endpoint) -> None:
    page = opened(QUESTION)
    card(page, "Bell").get_by_role("switch").uncheck()
    settled(page)
    assert endpoint.doors.requests[-1]["without"] == [0]
    expect(card(page, "Bell")).to_have_class("card off")
    expect(page.locator("#found")).to_have_text("3 read, 1 left out")
    before = page.locator("#before")
    expect(before.locator(".word")).to_have_text(["Alexander", "Graham", "Bell"])
    expect(before.locator("li")).to_have_text(re.compile("without passage [123], “Bell”"))
    expect(before).to_contain_text(re.compile("the same answer, .* less likely"))
    accessible(page)
    card(page, "The telephone").get_by_role("switch").uncheck()
    settled(page)
    assert words(page) == ["Antonio", "Meucci"]
    expect(before).to_contain_text("another answer")
    former = numbers(page)
    card(page, "Bell").get_by_role("switch").check()
    settled(page)
    expect(before.locator("li")).to_have_text(re.compile("again with passage [123], “Bell”"))
    assert endpoint.doors.requests[-1]["without"] == [2]
    assert numbers(page).items() <= former.items(), "a number stays"
    before.get_by_role("button", name="Back to it").click()
    settled(page)
    assert words(page) == ["Antonio", "Meucci"]


def test_a_passage_of_ones_own_is_read_beside_the_others(opened: Open, endpoint: Endpoint) -> None:
    page = opened(QUESTION)
    text = "Who invented the telephone? Antonio Meucci, says this <b>passage</b>."
    page.get_by_text("Add one of your own").click()
    page.get_by_label("Title").fill("Mine")
    page.get_by_label("Text").fill(text)
    accessible(page)
    page.get_by_role("button", name="Add it, ask again").click()
    settled(page)
    assert endpoint.doors.requests[-1]["passages"] == [{"title": "Mine", "text": text}]
    own = card(page, "Mine")
    expect(own).to_contain_text("yours")
    expect(own.locator(".text")).to_have_text(text)
    expect(page.locator("#before li")).to_have_text("with passage 4, “Mine”")
    expect(page.locator(".card")).to_have_count(4)
    own.get_by_role("switch").uncheck()
    settled(page)
    assert "passages" not in endpoint.doors.requests[-1]
    expect(card(page, "Mine")).to_have_class("card off")
    page.reload()
    settled(page)
    expect(page.locator(".card")).to_have_count(3)


def test_a_passage_of_a_link_is_switched_off_whatever_white_space_is_around_it(
    opened: Open, endpoint: Endpoint
) -> None:
    own = quote(" Mine \n\n Antonio Meucci, says this passage. \n")
    page = opened(fragment=f"#question={quote(QUESTION)}&passage={own}")
    settled(page)
    card(page, "Mine").get_by_role("switch").uncheck()
    settled(page)
    assert "passages" not in endpoint.doors.requests[-1]
    expect(card(page, "Mine")).to_have_class("card off")


def test_a_link_with_a_passage_of_white_space_opens_at_once(opened: Open, endpoint: Endpoint) -> None:
    page = opened(fragment=f"#question={quote(QUESTION)}&passage=%0A{'+' * 150_000}")
    settled(page)
    assert words(page) == ["Alexander", "Graham", "Bell"]
    assert "passages" not in endpoint.doors.requests[-1]


def test_a_passage_of_a_link_goes_along_with_other_questions_only_where_it_is_shown(
    opened: Open, endpoint: Endpoint
) -> None:
    page = opened(fragment=f"#question={quote(QUESTION)}&passage=Mine%0A{'it+was+Bell+' * 1000}")
    settled(page)
    expect(page.get_by_role("alert")).to_contain_text("10000 characters")
    ask(page, QUESTION)
    assert "passages" in endpoint.doors.requests[-1], "of the link's own question it is a part"
    expect(page.get_by_role("alert")).to_contain_text("10000 characters")
    ask(page, "telephone by Antonio Meucci?")
    assert "passages" not in endpoint.doors.requests[-1]
    expect(page.locator(".card")).to_have_count(3)
    add(page, "It was Reis.")
    settled(page)
    ask(page, QUESTION)
    assert len(endpoint.doors.requests[-1]["passages"]) == 1
    expect(page.locator(".card")).to_have_count(4)


def test_a_passage_of_ones_own_that_is_refused_again_stays_left_out(opened: Open) -> None:
    page = opened(QUESTION)
    page.get_by_text("Add one of your own").click()
    page.get_by_label("Title").fill("Mine")
    page.get_by_label("Text").fill("Antonio Meucci, says this passage.")
    page.get_by_role("button", name="Add it, ask again").click()
    settled(page)
    card(page, "Mine").get_by_role("switch").uncheck()
    settled(page)
    page.route("**/v1/answer/stream", lambda route: route.fulfill(status=429, body="{}"))
    card(page, "Mine").get_by_role("switch").click()
    expect(page.get_by_role("alert")).to_be_in_viewport()
    settled(page)
    expect(card(page, "Mine")).to_have_class("card off")


def test_a_passage_that_a_link_leaves_out_is_told_once_it_takes_part(opened: Open) -> None:
    page = opened(fragment=f"#question={quote(QUESTION)}&without=0")
    settled(page)
    expect(card(page, "Passage 0")).to_have_class("card off")
    page.get_by_role("switch", name="Use passage 1").check()
    settled(page)
    expect(card(page, "Bell").locator(".text")).not_to_be_empty()
    expect(card(page, "Passage 0")).to_have_count(0)


def test_after_a_publication_passages_are_those_of_the_answer(opened: Open, publish: Callable[[], None]) -> None:
    page = opened(QUESTION)
    publish()
    page.get_by_text("How it answers").click()
    page.get_by_label(re.compile("^Passages, k")).fill("6")
    page.get_by_role("button", name="Ask with these").click()
    settled(page)
    assert sorted(page.locator(".card h3").all_inner_texts()) == sorted(each.title for each in PASSAGES)
    expect(page.locator("#before")).to_be_hidden()


def test_where_nothing_is_searched_no_index_has_changed(opened: Open, endpoint: Endpoint) -> None:
    page = opened(fragment=f"#question={quote(QUESTION)}&without=1&snapshot=former&k=0&passage=Mine%0Ait%20was%20Bell")
    settled(page)
    expect(page.locator("#notice")).to_be_hidden()
    assert endpoint.doors.requests[-1]["without"] == [1]


def test_after_a_publication_no_passage_is_left_out_for_another(
    opened: Open, endpoint: Endpoint, publish: Callable[[], None]
) -> None:
    def is_asked_with_all(page: Page) -> None:
        settled(page)
        assert "without" not in endpoint.doors.requests[-1]
        expect(page.locator("#notice")).to_have_text("The index has changed since: nothing is left out.")
        expect(page.locator("#found")).to_have_text("3 read")
        assert "without" not in page.url

    page = opened(QUESTION)
    card(page, "Bell").get_by_role("switch").uncheck()
    settled(page)
    link = page.url
    page.reload()
    settled(page)
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#found")).to_have_text("3 read, 1 left out")
    publish()
    card(page, "The telephone").get_by_role("switch").click()  # `uncheck` presses again what is drawn anew, and checked
    is_asked_with_all(page)
    is_asked_with_all(opened(fragment=link.removeprefix(endpoint.url)))
    card(page, "Bell").get_by_role("switch").uncheck()
    settled(page)
    assert endpoint.doors.requests[-1]["without"] == [5]
    expect(page.locator("#notice")).to_be_hidden()


def test_an_answer_is_not_compared_with_itself(opened: Open, endpoint: Endpoint) -> None:
    page = opened(QUESTION)
    page.get_by_role("button", name="Ask", exact=True).click()
    settled(page)
    expect(page.locator("#before")).to_be_hidden()
    page.get_by_label("Your question").fill(f"slowly: {QUESTION}")
    page.get_by_role("button", name="Ask", exact=True).click()
    for _ in range(3):
        endpoint.step()
    settled(page)
    page.get_by_text("How it answers").click()
    page.get_by_label(re.compile("^Passages, k")).fill("2")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator("#before").get_by_role("button", name="Back to it").click()  # before the other answer stands
    expect(page.locator("#before")).to_be_hidden()
    endpoint.only(3)  # that of two passages, which was left, is given up
    for _ in range(3):
        endpoint.step()
    settled(page)
    expect(page.locator("#before")).to_be_hidden()


def test_while_a_question_is_searched_a_switch_is_of_the_one_that_is_shown(opened: Open, endpoint: Endpoint) -> None:
    page = opened(QUESTION)
    page.get_by_label("Your question").fill("a question that hangs?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#status")).to_have_text("Searching …")
    card(page, "Bell").get_by_role("switch").uncheck()
    settled(page)
    asked = endpoint.doors.requests[-1]
    assert (asked["question"], asked["without"]) == (QUESTION, [0])
    expect(page.locator("#found")).to_have_text("3 read, 1 left out")


def test_what_an_answer_says_is_found_in_its_passages_whatever_it_is_spelled_with(opened: Open) -> None:
    page = opened("who was it, “Jean-Paul, 1914-1918”?")
    add(page, "Some say\u2028it was Jean-Paul, 1914-1918.")  # a line, where JavaScript reads one
    settled(page)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".card", has_text="Some say").locator("mark")).to_have_text("Jean-Paul, 1914-1918")


def test_a_passage_that_is_refused_is_not_lost(opened: Open) -> None:
    page = opened(QUESTION)
    text = "telephone " * 1001
    add(page, text)
    expect(page.get_by_role("alert")).to_contain_text("10000 characters")
    expect(page.get_by_label("Text")).to_be_visible()
    expect(page.get_by_label("Text")).to_have_value(text.strip())


def test_a_passage_that_was_taken_is_not_written_again(opened: Open, endpoint: Endpoint) -> None:
    page = opened()
    page.get_by_label("Your question").fill(f"slowly: {QUESTION}")
    page.keyboard.press("Enter")
    for n_read, text in enumerate(("It was Reis.", "It was Meucci."), start=4):
        expect(page.locator(".card")).to_have_count(n_read - 1)
        add(page, text)
        expect(page.locator("#status")).to_have_text(f"Reading {n_read} passages …")
        expect(page.get_by_label("Text")).to_have_value("")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.get_by_label("Text")).to_have_value("")
    assert [each["text"] for each in endpoint.doors.requests[-1]["passages"]] == ["It was Reis.", "It was Meucci."]


def test_a_passage_that_was_not_taken_is_written_again_unless_another_is(opened: Open) -> None:
    page = opened(QUESTION)
    held: list[Route] = []
    page.route("**/v1/answer/stream", lambda route: held.append(route))
    text = page.get_by_label("Text")
    with page.expect_request("**/v1/answer/stream"):
        add(page, "It was Reis.")
    expect(text).to_have_value("")
    page.get_by_role("button", name="Stop").click()
    expect(text).to_have_value("It was Reis.")
    with page.expect_request("**/v1/answer/stream"):
        page.get_by_role("button", name="Add it, ask again").click()
    page.get_by_text("Add one of your own").click()
    text.fill("It was Meucci.")
    held[-1].fulfill(status=429, body="{}")
    expect(page.get_by_role("alert")).to_be_visible()
    settled(page)
    expect(text).to_have_value("It was Meucci.")


def test_other_settings_are_compared_with_those_before(opened: Open, endpoint: Endpoint) -> None:
    page = opened(QUESTION)
    page.get_by_text("How it answers").click()
    page.get_by_label("Formulation").select_option("token")
    expect(page.get_by_label("Decoding")).to_be_disabled()
    page.get_by_label(re.compile("^Passages, k")).fill("2")
    page.get_by_label(re.compile("^Beams")).fill("1")
    page.get_by_label(re.compile("^Temperature")).fill("0.5")
    accessible(page)
    page.get_by_role("button", name="Ask with these").click()
    settled(page)
    asked = endpoint.doors.requests[-1]
    assert asked == {
        "question": QUESTION,
        "formulation": "token",
        "k": 2,
        "n_beams": 1,
        "temperature": 0.5,
        "tokens": True,
    }
    told = page.locator("#before li").all_inner_texts()
    assert told == [
        "formulation: as the server is set → RAG-Token",
        "passages: as the server is set → 2",
        "beams: as the server is set → 1",
        "temperature: as the server is set → 0.5",
    ]
    expect(page.locator("#how-now")).to_have_text("RAG-Token, passages 2, beams 1, temperature 0.5")


def test_the_answer_is_one_of_the_labels_that_are_given(opened: Open, endpoint: Endpoint) -> None:
    page = opened(QUESTION)
    page.get_by_text("How it answers").click()
    page.get_by_label(re.compile("^One of these")).fill("Antonio Meucci\n\n Alexander Graham Bell \n")
    expect(page.locator("#how-now")).to_have_text("one of Antonio Meucci, Alexander Graham Bell")
    page.get_by_role("button", name="Ask with these").click()
    settled(page)
    asked = endpoint.doors.requests[-1]
    assert asked == {"question": QUESTION, "labels": ["Antonio Meucci", "Alexander Graham Bell"], "tokens": True}
    answer = answer_of(endpoint, **asked)
    rows = page.locator("#answers li")
    expect(rows).to_have_count(2)
    for row, label in zip(rows.all(), answer["labels"], strict=True):
        assert row.locator("bdi").inner_text() == label["text"]
        assert shown(row.locator(".value").inner_text()) == pytest.approx(percent(label["log_probability"]), abs=0.51)
    expect(page.get_by_role("heading", name="Among these")).to_be_visible()
    expect(page.locator("#before li")).to_have_text(
        "one of: as the server is set → Antonio Meucci, Alexander Graham Bell"
    )
    accessible(page)
    page.reload()
    settled(page)
    assert endpoint.doors.requests[-1] == asked, "a link holds them"


def test_passages_are_looked_for_again(opened: Open, endpoint: Endpoint) -> None:
    page = opened(fragment=f"#question={quote(QUESTION)}&follow=1")
    settled(page)
    named(page, "follow", "Look again after")
    page.get_by_label("Formulation").select_option("token")
    page.get_by_label(re.compile("^Beams")).fill("1")
    page.get_by_role("button", name="Ask with these").click()
    settled(page)
    asked = endpoint.doors.requests[-1]
    assert asked == {"question": QUESTION, "formulation": "token", "n_beams": 1, "follow": 1, "tokens": True}
    answer = answer_of(endpoint, **asked)
    assert words(page) == answer["answer"].split()
    expect(page.locator(".card")).to_have_count(len(answer["evidence"]))
    assert len(answer["evidence"]) > 3, "more than were found at first"
    for i, token in enumerate(answer["tokens"]):
        page.locator(f"#words [data-word='{i}']").hover()
        expect(page.locator("#rests-title")).to_contain_text(f"“{token['text'].strip()}”")
        for evidence, log in zip(answer["evidence"], token["log_posterior"], strict=True):
            p = 0 if log is None else math.exp(log)
            assert lit(card(page, evidence["passage"]["title"])) == pytest.approx(p, abs=1e-6)


def test_another_question_numbers_its_passages_anew(opened: Open) -> None:
    page = opened(QUESTION)
    former = numbers(page)
    ask(page, "telephone by Antonio Meucci?")
    expect(page.locator(".card .chip")).to_have_text(["1", "2", "3"])
    assert set(numbers(page)) & set(former)
    expect(page.locator("#before")).to_be_hidden()


def test_several_answers_are_looked_at_one_by_one(opened: Open) -> None:
    page = opened(fragment=f"#question={quote(QUESTION)}&n_answers=2")
    settled(page)
    answers = page.locator("#answers button")
    assert [re.sub(r"\s*[\d.]+%$", "", each) for each in answers.all_inner_texts()] == [
        "Alexander Graham Bell",
        "Antonio Meucci",
    ]
    answers.nth(1).click()
    assert words(page) == ["Antonio", "Meucci"]
    expect(answers.nth(1)).to_be_focused()
    expect(answers.nth(1)).to_have_attribute("aria-pressed", "true")
    accessible(page)


def test_an_answer_that_is_held_back_says_what_it_would_have_been(opened: Open) -> None:
    page = opened(fragment=f"#question={quote(QUESTION)}&min_probability=0.99")
    settled(page)
    expect(page.locator("#notice")).to_contain_text("Held back: it is less likely than the 99%")
    assert words(page) == ["Alexander", "Graham", "Bell"]
    expect(page.locator("#status")).to_contain_text("The answer is held back.")
    accessible(page)


def test_an_answer_that_did_not_end_by_itself_says_so(opened: Open) -> None:
    page = opened("the endless telephone")
    expect(page.locator("#notice")).to_have_text("Cut off.")


def test_a_partial_answer_says_so(opened: Open, endpoint: Endpoint) -> None:
    endpoint.index.missing_shards.add(1)
    try:
        page = opened(fragment=f"#question={quote(QUESTION)}&min_coverage=0.3")
        settled(page)
        expect(page.locator("#notice")).to_have_text(
            "Partial: 3 of 6 passages were searched; shard 1 did not take part."
        )
        accessible(page)
    finally:
        endpoint.index.missing_shards.clear()


def test_an_empty_answer_says_so(opened: Open) -> None:
    page = opened("the telephone: “”")
    expect(page.locator("#notice")).to_have_text("The answer is empty: the model ended it before the first word.")
    expect(page.locator("#status")).to_contain_text("Answer: (empty).")
    accessible(page)


# --- what goes wrong


@pytest.mark.parametrize(
    ("question", "title", "says"),
    [
        ("busy", "Too many questions at the moment", "256 questions are being answered: try again later"),
        ("late", "It took too long", "the deadline passed before the answer"),
        ("gone", "It cannot answer at the moment", "no replica of the encoder answers"),
        ("failing", "It took too long", "the deadline passed during the answer"),
    ],
)
def test_what_goes_wrong_is_said_and_can_be_tried_again(
    opened: Open, endpoint: Endpoint, question: str, title: str, says: str
) -> None:
    page = opened(question)
    alert = page.get_by_role("alert")
    expect(alert.get_by_role("heading")).to_have_text(title)
    expect(alert).to_contain_text(says)
    expect(alert.get_by_role("button")).to_have_count(0)  # it counts down, and each change is read out
    again = page.get_by_role("button", name="Try again")
    if question == "busy":
        expect(again).to_have_text(re.compile(r"Try again \(in [1-7] s\)"))
    if question == "failing":
        expect(page.locator("#words [data-word]")).to_have_text(["Alexander"])
    accessible(page)
    n_asked = len(endpoint.doors.requests)
    again.click()
    settled(page)
    assert len(endpoint.doors.requests) == n_asked + 1


def test_a_server_that_goes_in_the_middle_leaves_what_has_come(opened: Open, endpoint: Endpoint) -> None:
    page = opened()
    page.get_by_label("Your question").fill("slowly broken")
    page.keyboard.press("Enter")
    endpoint.step()
    expect(page.locator("#words [data-word]")).to_have_count(1)
    endpoint.step()
    alert = page.get_by_role("alert")
    expect(alert.get_by_role("heading")).to_have_text("The connection broke off")
    expect(alert).to_contain_text("The answer is not whole: what had come until then is shown.")
    assert len(words(page)) == 1
    expect(page.get_by_role("button", name="Try again")).to_be_visible()


def test_a_server_that_is_gone_is_told(opened: Open, endpoint: Endpoint) -> None:
    page = opened()
    page.route("**/v1/answer/stream", lambda route: route.abort("connectionrefused"))
    ask(page, QUESTION)
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
    page.unroute("**/v1/answer/stream")
    page.get_by_role("button", name="Try again").click()
    settled(page)
    assert words(page) == ["Alexander", "Graham", "Bell"]
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize(
    ("status", "body", "title", "says"),
    [
        (429, {"title": "Overloaded", "detail": "full", "request_id": "r-1"}, "Too many", "full"),
        (403, {"title": "Forbidden", "detail": "it needs the scope ask", "request_id": "r-2"}, "may not", "scope ask"),
        (502, "<html>Bad Gateway</html>", "Something went wrong", "HTTP 502"),
        (200, "event: retrieved\ndata: {", "The connection broke off", "not whole"),
    ],
)
def test_errors_are_read_in_every_shape(
    opened: Open, status: int, body: dict[str, Any] | str, title: str, says: str
) -> None:
    page = opened()
    text = body if isinstance(body, str) else json.dumps(body)
    page.route("**/v1/answer/stream", lambda route: route.fulfill(status=status, body=text))
    ask(page, QUESTION)
    alert = page.get_by_role("alert")
    expect(alert.get_by_role("heading")).to_contain_text(title)
    expect(alert).to_contain_text(says)


def test_a_field_that_is_wrong_is_named_and_shown(opened: Open) -> None:
    page = opened(fragment=f"#question={quote(QUESTION)}&k=1000")
    settled(page)
    box = named(page, "k must be 1..10, got 1000", "Passages, k")
    accessible(page)
    box.fill("2")
    page.keyboard.press("Enter")
    settled(page)
    expect(page.locator(".card")).to_have_count(2)
    expect(box).not_to_have_attribute("aria-invalid", "true")
    ask(page, "  ")
    expect(page.get_by_label("Your question")).to_be_focused()


def test_a_seed_that_javascript_would_round_is_refused(opened: Open, endpoint: Endpoint) -> None:
    page = opened(fragment=f"#question={quote(QUESTION)}&seed=9007199254740993")
    settled(page)
    box = named(page, "seed", "Seed")
    assert endpoint.doors.requests[-1]["seed"] == "9007199254740993"
    box.fill("9007199254740991")
    page.keyboard.press("Enter")
    settled(page)
    assert endpoint.doors.requests[-1]["seed"] == 9007199254740991


def test_what_was_refused_changes_nothing(opened: Open, endpoint: Endpoint) -> None:
    page = opened(QUESTION)
    page.route("**/v1/answer/stream", lambda route: route.fulfill(status=429, body="{}"))
    for title in ("Bell", "The telephone"):
        card(page, title).get_by_role("switch").click()
        expect(page.get_by_role("alert")).to_be_in_viewport()
        settled(page)
        expect(card(page, title).get_by_role("switch")).to_be_checked()
    page.unroute("**/v1/answer/stream")
    page.get_by_role("button", name="Try again").click()
    settled(page)
    assert endpoint.doors.requests[-1]["without"] == [2], "each of them was asked for alone"
    expect(page.locator("#found")).to_have_text("3 read, 1 left out")


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(opened: Open) -> None:
    page = opened("secret telephone")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("An API key is needed")
    expect(page.locator(".problem")).to_contain_text("r-401")
    expect(alert).not_to_contain_text("r-401")
    accessible(page)
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(alert).to_contain_text("This API key is not accepted")
    page.get_by_label("API key").fill("ключ")
    page.keyboard.press("Enter")
    expect(alert).to_contain_text("printable ASCII characters")
    expect(alert).to_contain_text("This API key is not accepted")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use it").click()
    settled(page)
    assert words(page) == ["Alexander", "Graham", "Bell"]
    assert KEY not in page.url + page.content()
    assert page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]") == [0, "", 1]
    page.get_by_role("button", name="Forget the API key").click()
    assert page.evaluate("sessionStorage.length") == 0


def test_where_no_data_of_sites_are_kept_a_key_lives_as_long_as_the_page(opened: Open) -> None:
    page = opened()
    refused = "{ get() { throw new DOMException('no data of sites', 'SecurityError'); } }"
    page.add_init_script(f"Object.defineProperty(window, 'sessionStorage', {refused})")
    page.reload()
    ask(page, "secret telephone")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use it").click()
    settled(page)
    assert words(page) == ["Alexander", "Graham", "Bell"]
    page.get_by_role("button", name="Forget the API key").click()
    ask(page, "secret telephone")
    expect(page.get_by_role("alert")).to_contain_text("An API key is needed")


# --- texts of anybody


def test_markup_in_passages_and_answers_is_text(opened: Open) -> None:
    page = opened(f"the telephone of “{HOSTILE}” 1876", fragment="#question=x&k=6")
    assert " ".join(words(page)) == HOSTILE
    expect(card(page, HOSTILE).locator(".text")).to_have_text(PASSAGES[4].text)
    assert page.locator("main img, main script").count() == 0
    assert "run" not in page.title().split()
    assert page.locator(".card a").all_inner_texts() == ["https://example.org/bell"], "no javascript: is a link"


def test_the_policy_holds_against_scripts_that_would_run(browser: Browser, endpoint: Endpoint) -> None:
    page = browser.new_page()
    page.goto(endpoint.url)
    assert page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"
    for attempt in ("document.body.innerHTML = '<b>'", "document.createElement('script').text = 'alert()'"):
        with pytest.raises(Error, match=r"Trusted(HTML|Script)"):
            page.evaluate(attempt)
    page.context.close()


def test_words_from_right_to_left_have_their_places(opened: Open) -> None:
    page = opened("the telephone 1876 of “אלכסנדר בל 😀 1876”", fragment="#question=x&k=6")
    assert words(page) == ["אלכסנדר", "בל", "😀", "1876"]
    first, last = (page.locator(f"#words [data-word='{i}']").bounding_box() for i in (0, 1))
    assert first is not None
    assert last is not None
    assert first["x"] > last["x"]
    page.locator("#words [data-word='0']").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#words [data-word='1']")).to_be_focused()
    title = page.locator(".card h3").filter(has_text="טלפון")
    expect(title).to_have_text(PASSAGES[3].title)
    accessible(page)


# --- without a mouse, on little room, on paper


def tab_to(page: Page, selector: str) -> None:
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"no {selector} is reached")


def test_everything_can_be_done_with_a_keyboard(opened: Open) -> None:
    page = opened()
    expect(page.get_by_label("Your question")).to_be_focused()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    settled(page)
    tab_to(page, "[data-word='0']")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#rests-title")).to_contain_text("“Graham”")
    back = "{key: 'ArrowLeft', altKey: true, bubbles: true, cancelable: true}"
    assert page.evaluate(f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {back}))"), "the browser's"
    expect(page.locator("#rests-title")).to_contain_text("“Graham”")
    page.keyboard.press("Enter")
    expect(page.locator("#words [data-word='1']")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Escape")
    expect(page.locator("#words [data-word='1']")).to_have_attribute("aria-pressed", "false")
    tab_to(page, ".card .chip")
    expect(page.locator("#words")).to_have_class(re.compile("shares"))
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    settled(page)
    expect(page.locator(".card.off")).to_have_count(1)
    assert page.evaluate("document.activeElement.matches('.card.off [role=switch]')"), "the focus stays"


def test_the_focus_stays_while_words_come(opened: Open, endpoint: Endpoint) -> None:
    page = opened()
    page.get_by_label("Your question").fill(f"slowly: {QUESTION}")
    page.keyboard.press("Enter")
    word, row = page.locator("#words [data-word]"), page.locator("#rests button")
    for n in (1, 2):
        endpoint.step()
        expect(word).to_have_count(n)
    tab_to(page, "[data-word='0']")
    page.keyboard.press("ArrowRight")
    endpoint.step()  # the third word, and with it the answer
    settled(page)
    expect(word.nth(1)).to_be_focused()
    expect(word.nth(1)).to_have_attribute("tabindex", "0")
    expect(page.locator("#rests-title")).to_contain_text("“Graham” rests on")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#rests-title")).to_have_text("Found, and being read")
    row.nth(1).focus()
    endpoint.step()
    expect(word).to_have_count(1)
    expect(row.nth(1)).to_be_focused()


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_is_wider_than_a_small_screen(opened: Open, width: int) -> None:
    page = opened(viewport={"width": width, "height": 640})
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) == width
    ask(page, f"the telephone of “{HOSTILE}” 1876")
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.locator(".card .switch").first.click()
    settled(page)
    assert page.evaluate(wide) == width
    heights = page.evaluate(
        """() => [...document.querySelectorAll("button, summary, select, .fields input, .switch, a")]
          .filter((each) => each.offsetParent && !each.closest(".source"))
          .map((each) => [each.getBoundingClientRect().height, each.outerHTML])"""
    )
    assert [each for each in heights if each[0] < 24] == []
    accessible(page)


def test_a_citation_stays_beside_its_word(opened: Open) -> None:
    page = opened(QUESTION)
    apart = page.evaluate(
        """() => {
          const [box, word, cite] = ["", " [data-word='2']", " sup"].map((at) => document.querySelector(`#words${at}`));
          return [...Array(300).keys()].filter((px) => {
            box.style.width = `${200 + px}px`;
            return cite.getBoundingClientRect().left < word.getBoundingClientRect().right;
          });
        }"""
    )
    assert apart == [], "of widths in pixels"


def test_an_answer_is_copied_without_its_citations(opened: Open) -> None:
    page = opened(QUESTION)
    expect(page.locator("#words sup")).not_to_have_count(0)
    page.evaluate("getSelection().selectAllChildren(document.getElementById('words'))")
    assert page.evaluate("getSelection().toString()") == "Alexander Graham Bell"


def test_a_long_question_is_seen_whole(opened: Open) -> None:
    page = opened(viewport={"width": 320, "height": 640})
    box = page.get_by_label("Your question")
    heights = "node => [node.clientHeight, node.scrollHeight]"
    (one, _) = box.evaluate(heights)
    box.fill("Which of the two who are named invented the telephone, and in which year?")
    (high, whole) = box.evaluate(heights)
    assert high > 2 * one
    assert whole <= high
    page.set_viewport_size({"width": 640, "height": 640})
    page.wait_for_function("high => document.getElementById('question').clientHeight < high", arg=high)


def test_on_paper_there_are_question_answer_and_numbers(opened: Open) -> None:
    page = opened(QUESTION)
    page.emulate_media(media="print")
    expect(page.get_by_role("heading", name=QUESTION)).to_be_in_viewport()
    expect(page.locator("#table")).to_be_visible()
    expect(page.locator("#ask")).to_be_hidden()
    assert page.pdf()[:4] == b"%PDF"


def test_forced_colours_and_little_motion_are_heeded(opened: Open) -> None:
    page = opened(QUESTION, forced_colors="active", reduced_motion="reduce")
    styles = (
        "([selector, name]) => [...document.querySelectorAll(selector)].map((each) => getComputedStyle(each)[name])"
    )
    assert set(page.evaluate(styles, ["*", "transitionDuration"])) == {"0s"}
    assert len(set(page.evaluate(styles, ["#words .strip i", "backgroundColor"]))) == 3, "passages keep their hues"


# --- links


def test_a_link_asks_again_for_everything_that_was_asked(opened: Open, endpoint: Endpoint) -> None:
    page = opened(QUESTION)
    first = page.url
    card(page, "Bell").get_by_role("switch").uncheck()
    settled(page)
    add(page, "“Quoted” & 100% ours; 電話 #1")
    settled(page)
    asked = endpoint.doors.requests[-1]
    assert page.locator("#link").get_attribute("href") == page.url.removeprefix(endpoint.url)
    again = opened(fragment=page.url.removeprefix(endpoint.url))
    settled(again)
    assert endpoint.doors.requests[-1] == asked
    assert words(again) == words(page)
    n_asked = len(endpoint.doors.requests)
    page.go_back()
    page.go_back()
    assert page.url == first
    expect(page.locator("#found")).to_have_text("3 read")
    assert len(endpoint.doors.requests) == n_asked, "what was seen is not asked again"
    page.get_by_role("link", name="openbook").click()
    expect(page.locator("#examples")).to_be_visible()


def test_the_request_for_a_shell_is_the_same(opened: Open, endpoint: Endpoint) -> None:
    page = opened("who's who of the telephone?")
    page.get_by_text("As a request").click()
    command = page.locator("#command").inner_text()
    body = re.fullmatch(rf"curl -s {endpoint.url}v1/answer -H 'Content-Type: application/json' -d '(.*)'", command)
    assert body is not None
    assert json.loads(body[1].replace("'\\''", "'")) == endpoint.doors.requests[-1]


@pytest.mark.parametrize(
    "fragment",
    [
        "#",
        "#question=",
        "#k=3",
        "#question=x&k=nine&without=a,2&passage=none&formulation=",
        "#question=x&decoding=toString&passage=%0A",
    ],
)
def test_a_link_that_makes_no_sense_does_no_harm(opened: Open, endpoint: Endpoint, fragment: str) -> None:
    page = opened(fragment=fragment)
    settled(page)
    if "question=x" in fragment:
        assert words(page) == ["Antonio", "Meucci"]
        assert set(endpoint.doors.requests[-1]) <= {"question", "tokens", "without"}
    else:
        expect(page.locator("#examples")).to_be_visible()


# --- what is computed in the browser


def test_words_are_cut_by_code_points_and_by_what_stands_in_a_token(opened: Open) -> None:
    page = opened()
    tokens = [
        {"text": "😀", "log_likelihood": -0.5, "log_posterior": [0, None], "start": 0, "end": 1},
        {"text": " a", "log_likelihood": -0.25, "log_posterior": [math.log(0.5)] * 2, "start": 1, "end": 3},
        {"text": "b", "log_likelihood": -0.25, "log_posterior": [None, 0], "start": 3, "end": 4},
        {"text": "", "log_likelihood": -0.1, "log_posterior": [0, None], "start": 4, "end": 4},
    ]
    cut = "(asked) => import('/page/model.js').then((model) => model.wordsOf(...asked))"
    face, ab, unknown = page.evaluate(cut, ["😀 ab c", tokens, "sequence"])
    assert (face["text"], face["shares"], face["log"]) == ("😀", [1, 0], -0.5)
    assert (ab["text"], ab["shares"], ab["log"]) == ("ab", [0, 1], -0.5)
    assert (unknown["text"], unknown.get("shares")) == ("c", None)
    _, mixed, _ = page.evaluate(cut, ["😀 ab c", tokens, "token"])
    assert mixed["shares"] == pytest.approx([0.25, 0.75])
    chinese = page.evaluate(cut, ["电话是贝尔发明的。", [], "token"])
    assert len(chinese) > 2
    assert "".join(word["text"] for word in chinese) == "电话是贝尔发明的。"
    assert [word["text"] for word in page.evaluate(cut, ["“AT&T”, 1877–1888 (U.S.)", [], "token"])] == [
        "“AT&T”,",
        "1877–1888",
        "(U.S.)",
    ]


def test_an_answer_is_found_in_a_passage_as_words_and_marks_are_of_them(opened: Open) -> None:
    page = opened()
    find = "(asked) => import('/page/model.js').then((model) => model.placesOf(...asked))"
    assert page.evaluate(find, ["new york", "New\nYork, newYork, New Yorker"]) == [[0, 8]]
    for word, text, at in (
        ("सत", "सत्य, सत", 6),
        ("ก", "กิน ก", 4),
        ("cafe", "cafe\u0301, cafe", 7),
        ("א", "בָא, א", 5),
        ("a", "❤️a", 2),
    ):
        assert page.evaluate(find, [word, text]) == [[at, at + len(word)]]


def test_numbers_are_told_as_they_are(opened: Open) -> None:
    page = opened()
    told = page.evaluate(
        """() => import('/page/model.js').then((m) => ({
          percent: [0, 1e-9, 0.001, 0.0625, 0.5, 0.9961, 0.99951, 1].map(m.percent),
          seconds: [0.0004, 0.0312, 0.9999, 12.3].map(m.seconds),
          ratio: [m.ratio(0.2, 0.1), m.ratio(0.1, 0.25), m.ratio(0.5, 0.5), m.ratio(1, 0), m.ratio(0.9, 0.0009)],
          nats: [m.nats(-1.25), m.nats(-Infinity)],
        }))"""
    )
    assert told == {
        "percent": ["0%", "<0.1%", "0.1%", "6.3%", "50%", "99.6%", ">99.9%", "100%"],
        "seconds": ["0.4 ms", "31 ms", "1.0 s", "12 s"],
        "ratio": ["2.0 times as likely", "2.5 times less likely", "as likely as before", "", "1,000 times as likely"],
        "nats": ["−1.250", "−∞"],
    }


# --- the files


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 60_000


def test_nothing_in_the_page_comes_from_elsewhere() -> None:
    said = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    hosts = {host for text in said.values() for host in re.findall(r"https?://([\w.]+)", text)}
    assert hosts == {"www.w3.org"}  # the names of SVG
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", "".join(said.values()))


def test_the_page_is_served_with_its_policy_and_once(endpoint: Endpoint) -> None:
    with httpx.Client(base_url=endpoint.url, trust_env=False) as client:
        whole = client.get("/")
        assert whole.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in whole.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in whole.headers["content-security-policy"]
        assert "unsafe" not in whole.headers["content-security-policy"]
        assert (whole.headers["x-content-type-options"], whole.headers["referrer-policy"]) == ("nosniff", "no-referrer")
        plain = client.get("/", headers={"Accept-Encoding": "identity"})
        assert (plain.text, plain.headers.get("content-encoding")) == (whole.text, None)
        assert (whole.headers["content-encoding"], plain.headers["etag"] != whole.headers["etag"]) == ("gzip", True)
        again = client.get("/", headers={"If-None-Match": whole.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for known, status in (('"older", ' + whole.headers["etag"], 304), ("*", 304), ('"older"', 200)):
            assert client.get("/", headers={"If-None-Match": known}).status_code == status
        for accepted, packs in (("gzip;q=0, identity", False), ("br, gzip; q=0.000", False), ("GZip;q=0.1", True)):
            sent = client.get("/", headers={"Accept-Encoding": accepted})
            assert (sent.headers.get("content-encoding") == "gzip", sent.text) == (packs, whole.text), accepted
        head = client.head("/")
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", whole.headers["etag"])
        names = re.findall(r'(?:href|src)="(page/[^"]+)"', whole.text)
        assert len(names) > 1
        for name in names:
            assert client.get(f"/{name}").status_code == 200
        missing = client.get("/page/..%2f..%2fhttp.py")
        assert (missing.status_code, client.get("/page/none").status_code) == (404, 404)
        assert client.post("/").status_code == 405
