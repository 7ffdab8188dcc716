"""What documents are split by, beside words: the tokens of an encoder, and sentences."""

from collections.abc import Sequence

from openbook.core.splitting import CountTokens, FindSentences
from openbook.errors import InvalidConfig

MAX_KNOWN = 1 << 20
MAX_CHARS = 32
"""Of a word that is remembered: longer ones seldom come again."""

STRETCH = 8192
"""Characters in which sentences are looked for together: sentencex takes quadratic time where there are no spaces."""


class TokenCounts:
    """Counts tokens of words, and remembers most of them: some 100 MB at most."""

    def __init__(self, count_tokens: CountTokens) -> None:
        self._count = count_tokens
        self._known: dict[str, int] = {}

    def __call__(self, words: Sequence[str]) -> list[int]:
        """Of each word."""
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        new = [word for word in dict.fromkeys(words) if word not in self._known]
        found = dict(zip(new, self._count(new), strict=True)) if new else {}
        self._known |= {word: n for word, n in found.items() if len(word) <= MAX_CHARS}
        return [found[word] if word in found else self._known[word] for word in words]


def sentence_finder() -> FindSentences:
    """Finds where sentences end, by the rules and abbreviations of the text's language, English if it is unknown.

    Raises:
        InvalidConfig: sentencex is not installed.
    """
    try:
        from sentencex import get_sentence_boundaries
    except ImportError:
        raise InvalidConfig("sentences need sentencex: pip install 'openbook[corpus]'") from None

    def find(text: str, language: str) -> list[int]:
        primary = language.replace("_", "-").split("-")[0].strip().lower() or "en"
        ends: list[int] = []
        start = 0
        while start < len(text):
            stretch = text[start : start + STRETCH]
            found = [start + sentence["end_index"] for sentence in get_sentence_boundaries(primary, stretch)]
            if start + len(stretch) < len(text):
                found.pop()  # cut, perhaps: the next stretch begins with it
            ends += found
            start = found[-1] if found else start + len(stretch)
        return ends

    return find
