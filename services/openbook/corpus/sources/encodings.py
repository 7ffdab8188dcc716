"""Bytes to text."""

import codecs

from openbook.corpus.sources.limits import Failed

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decoded(content: bytes) -> str:
    """Text by its byte order mark, or else UTF-8. Raises Failed."""
    encoding = "utf-16" if content[:2] in UTF_16 else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise Failed(f"not {encoding.upper().removesuffix('-SIG')}: {error.reason} at byte {error.start}") from None
