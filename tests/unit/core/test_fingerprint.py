from pathlib import Path

import pytest

from openbook.core.fingerprint import file_digest, json_digest, text_digest

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1


def test_a_digest_is_sha256_wherever_the_bytes_come_from(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert text_digest("abc") == file_digest(path) == ABC


def test_a_file_longer_than_any_buffer(tmp_path: Path) -> None:
    text = "0123456789abcdef" * 100_000
    (tmp_path / "big").write_text(text)
    assert file_digest(tmp_path / "big") == text_digest(text)


def test_texts_are_not_normalised() -> None:
    assert len({text_digest(text) for text in ("é", "e\u0301", "é ", "É")}) == 4


def test_json_is_the_same_in_any_order_of_keys() -> None:
    assert json_digest({"a": 1, "b": [1.5, "é"]}) == json_digest({"b": [1.5, "é"], "a": 1})
    assert json_digest({"a": 1}) != json_digest({"a": "1"})
    with pytest.raises(ValueError, match="JSON"):
        json_digest(float("nan"))
