"""What the documentation says can be done is done here, and the tests that it cites exist."""

import re
from pathlib import Path
from typing import Any

import tiny_checkpoints as tiny

from openbook.models.checkpoint import load_generator

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
CITED = re.compile(r"\[`(test_\w+)`\]\(([^)]+)\)")


def _python(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _run(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for number, code in enumerate(_python(page), start=1):
        compiled = compile(code, f"{page}, block {number}", "exec")
        if "Client(" not in code:  # that one needs a running system: tests/e2e asks the same of it
            exec(compiled, names)
    return names


def test_the_code_of_the_readme_runs() -> None:
    assert len(_run("README.md")["answers"]) == 2


def test_the_code_about_decoding_runs(tmp_path: Path) -> None:
    names = _run("docs/decoding.md")
    dpr = tiny.save(tmp_path / "dpr", tiny.rag().question_encoder, tiny.word_tokenizer())
    bart = tiny.save(tmp_path / "bart", tiny.bart(), tiny.byte_tokenizer())
    names["combine"](dpr, bart, tmp_path / "rag")
    assert load_generator(str(tmp_path / "rag")).fingerprint == load_generator(bart).fingerprint


def test_every_test_that_is_cited_exists() -> None:
    cited = {(page, *link) for page in PAGES for link in CITED.findall(page.read_text(encoding="utf-8"))}
    assert cited
    missing = [
        f"{page.name}: {name} in {path}"
        for page, name, path in cited
        if f"def {name}(" not in (page.parent / path).read_text(encoding="utf-8")
    ]
    assert not missing


def test_every_trap_has_its_row() -> None:
    tests = re.findall(r"^def (test_\w+)", (ROOT / "tests/unit/models/test_traps.py").read_text(), re.MULTILINE)
    rows = [name for name, _ in CITED.findall((ROOT / "docs/decoding.md").read_text(encoding="utf-8"))]
    assert len(tests) > 20
    assert [name for name in tests if rows.count(name) != 1] == []
