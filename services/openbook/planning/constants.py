"""What a plan rests on: numbers of this project, each with the page that has it, or those of a machine measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from openbook.config import Section, read_mapping
from openbook.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Constant:
    """One number, and where it is from."""

    value: float
    means: str
    source: str


Constants = Mapping[str, Constant]


def _of(value: float, means: str, page: str) -> Constant:
    return Constant(value, means, page if " " in page else f"docs/measurements/{page}")


# Times are seconds of one core. `alone`: a caller who waits for each answer; the others: 64 at once.
DEFAULTS: Constants = MappingProxyType(
    {
        "bytes_per_word": _of(6.29, "bytes of a word of a passage, its space included", "plan.md"),
        "title_bytes": _of(39, "bytes of title and document's name", "plan.md"),
        "words_indexed": _of(0.52, "different words that are indexed, of a passage's words", "plan.md"),
        "vocabulary_bytes": _of(1.3e6, "of the index of words, whatever the number of passages", "plan.md"),
        "passages_per_document": _of(2.0, "passages of a document, for what is known of each document", "plan.md"),
        "server_bytes": _of(100e6, "memory of an index server before its index, without libraries' files", "plan.md"),
        "blas_bytes": _of(35e6, "more memory of a server of a Flat index", "plan.md"),
        "call_s": _of(0.213e-3, "a search that finds nothing to do, alone", "plan.md"),
        "shard_s": _of(0.244e-3, "the same for each shard beyond the first", "plan.md"),
        "call_cpu_s": _of(0.042e-3, "of a server, for such a search", "plan.md"),
        "client_cpu_s": _of(0.079e-3, "of who asks, for such a search", "plan.md"),
        "flat_alone_s": _of(0.135e-9, "a number of a Flat index read for one query", "plan.md"),
        "flat_s": _of(0.023e-9, "a number of a Flat index multiplied", "plan.md"),
        "codes_alone_s": _of(55e-9 / 768, "a byte of codes scanned for one query", "scale.md"),
        "codes_s": _of(62e-9 / 768, "a byte of codes scanned for one of many queries", "scale.md"),
        "cells_alone_s": _of(0.063e-3, "a search of cells, besides finding and reading them, for one query", "plan.md"),
        "cells_s": _of(0.021e-3, "the same for one of many queries", "plan.md"),
        "graph_alone_s": _of(
            0.26e-3 / 17.6 / 768, "a number in each of log2(passages) steps of a graph", "index-server.md"
        ),
        "graph_s": _of(0.26e-3 / 17.6 / 768 / 1.2, "the same for one of many queries", "index-server.md"),
        "graph_step_alone_s": _of(0.0, "such a step, whatever its numbers", "plan.md"),
        "graph_step_s": _of(0.0, "the same for one of many queries", "plan.md"),
        "rescored_s": _of(
            0.9e-3 / 40, "a read of an exact vector that is not in memory, where 40 are asked for at once", "scale.md"
        ),
        "encode_s": _of(1 / 172, "a question encoded by the embedded encoder, bfloat16", "encoder.md"),
        "generate_s": _of(2 / 4.27, "an answer of the embedded generator, 4 beams, 5 passages", "serving.md"),
        "endpoint_s": _of(13.0e-3, "of all processes besides the models, `split` behind HAProxy", "hops.md"),
        "index_tail": _of(2.5, "p99 of a search over its p50", "scale.md"),
        "endpoint_tail": _of(3.1, "p99 of an answer over its p50, at 70 % of what can be answered", "serving.md"),
        "embedded_parameters": _of(30.0e6, "of the embedded generator", "assumed: time grows with the parameters"),
        "busy": _of(
            0.7, "of what cores can do, so that nobody waits long", "assumed: where the p99 above was measured"
        ),
        "usable": _of(0.9, "of memory and disk, for what else a machine holds", "assumed: the rest is the system's"),
        "snapshots_on_disk": _of(
            2, "the one served, and the next one before it is published", "docs/publish.md: roots"
        ),
    }
)


class Calibration(Section):
    """What `openbook plan --calibrate` has measured."""

    machine: str
    date: str
    values: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


def constants(path: Path | None = None) -> Constants:
    """All of them; those that a calibration measured are its own. Raises InvalidConfig: names file and name."""
    if path is None:
        return DEFAULTS
    return calibrated(read_mapping(Calibration, path), str(path))


def calibrated(calibration: Calibration, where: str = "calibration") -> Constants:
    """The defaults with what was measured in place of them. Raises InvalidConfig for a name that is none."""
    if unknown := calibration.values.keys() - DEFAULTS.keys():
        raise InvalidConfig(f"{where}: values: unknown: {', '.join(sorted(unknown))}")
    source = f"calibrated: {calibration.machine}, {calibration.date}"
    return dict(DEFAULTS) | {
        name: replace(DEFAULTS[name], value=value, source=source) for name, value in calibration.values.items()
    }
