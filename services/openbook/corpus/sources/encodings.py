"""Bytes to text."""

import codecs
import re

from openbook.corpus.sources.limits import Failed

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CHARSET = re.compile(
    rb"<!--.*?-->"
    rb"|\A\s*<\?xml\s[^>]*?encoding\s*=\s*[\"']([\w.:-]+)"
    rb"|<meta(?=[^>]*\shttp-equiv\s*=)[^>]*?[\s;\"']charset\s*=\s*[\"']?\s*([\w.:-]+)"
    rb"|<meta(?:\s+[^\s=>]+(?:\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^\s\"'>]+))?)*?\s+charset\s*=\s*[\"']?\s*([\w.:-]+)",
    re.DOTALL | re.IGNORECASE,
)
"""Where a page says its own: scripts and forms have others, and texts speak of them."""
_AS_BROWSERS = {
    **dict.fromkeys(("ascii", "iso8859-1"), "cp1252"),
    **dict.fromkeys(("gb2312", "gbk", "x-gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "x-sjis"), "cp932"),
    **dict.fromkeys(("euc_kr", "windows-949"), "cp949"),
    **dict.fromkeys(("big5", "x-x-big5"), "big5hkscs"),
    **dict.fromkeys(("windows-874", "dos-874"), "cp874"),
    **{f"x-cp125{i}": f"cp125{i}" for i in range(9)},
    "iso-8859-8-i": "iso8859-8",
    "x-euc-jp": "euc_jp",
}
"""As the WHATWG's standard has it, what a page is read as that says this: pages have more characters than what they say
has. By Python's names, and by those that Python does not know."""
_OF_WINDOWS = {code: bytes([code]).decode("cp1252", "ignore") or chr(code) for code in range(0x80, 0xA0)}
"""Of cp1252, also the five that Python leaves out."""


def decoded(content: bytes) -> str:
    """Text by its byte order mark, or else UTF-8. Raises Failed."""
    encoding = "utf-16" if content[:2] in UTF_16 else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise Failed(f"not {encoding.upper().removesuffix('-SIG')}: {error.reason} at byte {error.start}") from None


def as_browsers(content: bytes, charset: str) -> str:
    """By its byte order mark, or else as its server says, or else as it says itself, as in browsers, as far as these
    exist and it is so; or else UTF-8. Raises Failed.
    """
    if content.startswith((*UTF_16, codecs.BOM_UTF8)):
        return decoded(content)
    own = next((name.decode() for said in _CHARSET.findall(content[:4096]) for name in said if name), "")
    failed = None
    for name in (charset, own):
        try:
            known = codecs.lookup(_AS_BROWSERS.get(name.lower(), name)).name
            encoding = _AS_BROWSERS.get(known, known)
            if encoding == "cp1252":
                return content.decode("latin-1").translate(_OF_WINDOWS)
            if own and encoding.startswith("utf-16"):  # it says so in ASCII, so it is not
                encoding = "utf-8"
            return content.decode(encoding)
        except UnicodeDecodeError as error:
            failed = failed or Failed(f"says it were {name}, and is not: {error}")
        except (LookupError, ValueError):  # no name, or one that nobody knows but Python
            continue
    try:
        return decoded(content)
    except Failed as error:
        raise failed or error from None
