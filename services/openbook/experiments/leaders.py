"""Who led which country at a date: the CIA World Factbook's words as passages, and as questions with answers."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from importlib import resources
from pathlib import Path

from openbook.corpus.read import lines
from openbook.errors import InvalidDocuments

DATES = ("2016-11-26", "2020-11-27")
"""Of the files that ship with openbook."""
ROLES = {"chief_of_state": "chief of state", "head_of_government": "head of government"}
TITLES = (
    *("Federal Chancellor", "Chancellor", "Prime Minister", "President", "Premier"),
    *("King", "Queen", "Emperor", "Amir", "Sultan", "Grand Duke", "Prince"),
)
HOLDER = re.compile(
    rf"(?i:(?:(?:Acting|Interim|Transitional|Caretaker) )?(?:(?P<title>{'|'.join(TITLES)}) )?)"
    r"(?P<name>['A-Z][^(),;]*) \(since (?P<since>[^()]+?) ?\)"
)
SURNAME = re.compile(r"(?:(?<= )|^)[^\sa-z]{2,}(?: [^\sa-z]{2,})*(?= |$)")

OFFICE = re.compile(rf"\b(?:{'|'.join(TITLES)}|Chairman|Chief|Minister|Coprince|Co-prince|Secretary|Mayor)\b")
"""What no name has in it."""
SAME = 0.8
"""Names as alike as this are of one person, spelled in two ways."""
SPELLED = re.compile(r"(?![IVX]+$)[^\sa-z]{2,}")
"""A word in capitals, but no number of a king."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Who holds an office."""

    country: str
    role: str  # one of ROLES
    title: str  # such as President, or empty
    name: str  # as it is written, "Abdelaziz Bouteflika"
    surname: str
    since: str

    @property
    def answers(self) -> tuple[str, ...]:
        """What a right answer may be."""
        titled = (f"{self.title} {self.name}",) if self.title else ()
        return tuple(dict.fromkeys((self.name, self.surname, *titled)))


def read_leaders(path: Path) -> dict[tuple[str, str], Leader]:
    """By country and role, of a file of JSON lines, also `.gz`, with `country`, `chief_of_state` and
    `head_of_government`. Offices of which the words tell no single name are left out.

    Raises:
        InvalidDocuments: the file cannot be read, or has no leaders; names file and line.
    """
    found: dict[tuple[str, str], Leader] = {}
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if row["country"] is None:  # the Factbook has some without
                continue
            country = _in_order(row["country"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InvalidDocuments(f"{path}:{number}: must be a JSON object with a country") from None
        for role in ROLES:
            if leader := _leader(country, role, str(row.get(role))):
                found[country, role] = leader
    if not found:
        raise InvalidDocuments(f"{path}: names no leader")
    return found


def shipped(date: str) -> Path:
    """The file of one of DATES."""
    return Path(str(resources.files("openbook") / f"experiments/data/world-leaders-{date}.jsonl.gz"))


def documents(leaders: Mapping[tuple[str, str], Leader]) -> list[dict[str, str]]:
    """One a country, with a sentence for each office."""
    texts: dict[str, list[str]] = {}
    for leader in leaders.values():
        texts.setdefault(leader.country, []).append(_sentence(leader))
    return [
        {"id": country, "title": f"Government of {country}", "text": " ".join(sentences)}
        for country, sentences in sorted(texts.items())
    ]


@dataclass(frozen=True, slots=True)
class Changed:
    """An office whose holder is another one at the second date."""

    question: str
    before: Leader
    after: Leader


def changed(before: Mapping[tuple[str, str], Leader], after: Mapping[tuple[str, str], Leader]) -> list[Changed]:
    """Those known at both dates under one title, in the order of their countries, each question once."""
    found: dict[str, Changed] = {}
    for key in sorted(before.keys() & after.keys()):
        one, other = before[key], after[key]
        title = one.title or other.title
        if title and title in (other.title or title) and not _same(one, other):
            question = f"Who is the {title.lower()} of {one.country}?"
            found.setdefault(question, Changed(question, one, other))
    return list(found.values())


def _same(one: Leader, other: Leader) -> bool:
    alike = SequenceMatcher(None, one.name.lower(), other.name.lower(), autojunk=False).ratio()
    return one.surname == other.surname or alike >= SAME


def _leader(country: str, role: str, words: str) -> Leader | None:
    holder = HOLDER.match(words)
    surnames = SURNAME.findall(holder["name"]) if holder else []
    if holder is None or len(surnames) != 1 or OFFICE.search(holder["name"]):
        return None
    return Leader(
        country, role, (holder["title"] or "").title(), _spelled(holder["name"]), _spelled(surnames[0]), holder["since"]
    )


def _spelled(name: str) -> str:
    """Surnames stand in capitals there."""
    return " ".join(word.title() if SPELLED.fullmatch(word) else word for word in name.split())


def _in_order(country: str) -> str:
    """Gambia, The: The Gambia."""
    last, _, first = country.partition(", ")
    return f"{first} {last}" if first else last


def _sentence(leader: Leader) -> str:
    office = leader.title or ROLES[leader.role].capitalize()
    return f"{leader.name} has been the {office} of {leader.country} since {leader.since}."
