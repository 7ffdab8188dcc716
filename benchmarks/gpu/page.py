"""What was found: as a page of Markdown, and as a dictionary."""

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from typing import Any

import torch
import transformers

from gpu.part import Cell, Check, Part, shown

HEAD = """# What only a GPU can tell

| | |
|---|---|
| command | `{command}` |
| date | {day} |
| machine | {machine} |
| what | random weights; contexts of {real} tokens, padded to {padded} as transformers' retriever does |

Times are wall clock, the device waited for, after a first run. GB is what was allocated at once, beyond what was there
before.
"""


def page(parts: Sequence[Part], command: str, described: dict[str, Any]) -> str:
    """Machine, verdicts, then the parts with their tables and checks."""
    sizes = parts[0].sizes
    machine = ", ".join(f"{value}" if name == "name" else f"{name} {value}" for name, value in described.items())
    head = HEAD.format(command=command, machine=machine, day=date.today(), real=sizes.real, padded=sizes.padded)
    rows = [(part.does, verdict(part), f"{part.seconds:.0f} s of {part.budget_s:.0f}") for part in parts]
    return "\n".join([head, table(("part", "", "took"), rows), *map(section, parts)])


def section(part: Part) -> str:
    """One part."""
    lines = [f"## {part.does}", ""]
    if part.error:
        lines += [f"Failed: `{part.error.splitlines()[0]}`", ""]
    if part.rows:
        lines += [table(part.columns, part.rows)]
    if part.left_out:
        lines += ["Left out, for the time was up: " + "; ".join(part.left_out) + ".", ""]
    if part.checks:
        lines += [table(("check", "found", "at most", "passed", "why this limit"), map(told, part.checks))]
    return "\n".join(lines)


def told(check: Check) -> Sequence[Cell]:
    """As a row."""
    return check.what, f"{check.found:.2g}", f"{check.at_most:g}", "yes" if check.passed else "**no**", check.why


def table(columns: Sequence[str], rows: Any) -> str:
    """In Markdown."""
    cells = [columns, ["---"] * len(columns), *([shown(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n"


def verdict(part: Part) -> str:
    """In a word or two."""
    if part.error:
        return "failed"
    n_passed = sum(check.passed for check in part.checks)
    return f"{n_passed} of {len(part.checks)} checks passed" + (", not complete" if part.left_out else "")


def summary(parts: Sequence[Part]) -> dict[str, Any]:
    """All of it, by part."""
    names = ("error", "seconds", "columns", "rows", "left_out")
    return {
        part.name: {
            "passed": part.passed,
            "checks": [asdict(check) | {"passed": check.passed} for check in part.checks],
            **{name: getattr(part, name) for name in names},
        }
        for part in parts
    }


def machine(device: torch.device) -> dict[str, Any]:
    """What everything ran on."""
    described: dict[str, Any] = {"name": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {"name": f"{properties.name}, {properties.total_memory / 1e9:.0f} GB", "driver": driver()}
        described["CUDA"] = torch.version.cuda
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return described | versions | {"Python": platform.python_version()}


def driver() -> str:
    """Its version; torch does not say."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, check=True, capture_output=True, text=True, timeout=10).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
