"""Where a passage can be looked up, for protocols that cite by URL."""

from urllib.parse import quote

from openbook.core.types import Passage


def url_of(passage: Passage) -> str:
    """That of its origin; or its document's id, if that is one; else the id as one that leads nowhere and names it:
    `openbook:<id>`.

    Of a caller's own passage that names no document it is the passage's: `openbook:-1`.
    """
    if passage.origin and passage.origin.url:
        return passage.origin.url
    named = passage.document_id or str(passage.id)
    return named if named.startswith(("https://", "http://")) else f"openbook:{quote(named)}"
