"""What is wanted, and the machines that may be taken."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from openbook.config import Positive, Seconds, Section, read_mapping

Share = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Demand(Section):
    """What a system is to do."""

    passages: Positive  # today
    dimension: Annotated[int, Field(ge=1, le=4096)] = 384  # of their embeddings; 768 of DPR's
    words: Amount = 100  # of a passage
    index: str | None = None  # Flat, HNSW32, IVF,SQ8, IVF,RaBitQfs; none: the cheapest that suffices
    recall: Share = 0.9  # at 10, of the index
    exact_dtype: Annotated[str, Field(pattern="^float(16|32)$")] = "float32"  # `openbook build --exact-dtype`
    questions_per_s: Amount = 1.0  # at the busiest hour, today
    p99_s: Seconds = 10.0  # of an answer
    growth: Annotated[float, Field(ge=0, le=100)] = 0.0  # of passages and questions a year: 0.5 is half as many more
    years: Annotated[float, Field(ge=0, le=30)] = 1.0  # that it is to last
    failures: Annotated[int, Field(ge=0, le=5)] = 1  # machines of each kind that may be lost
    generator_parameters: Amount = 30.0e6  # of the generator; the embedded one's

    @property
    def grown(self) -> float:
        """What passages and questions are multiplied by at the end."""
        return float((1 + self.growth) ** self.years)


class Machine(Section):
    """A kind of machine."""

    name: str
    cores: Positive
    memory_gb: Amount
    disk_gb: Amount
    price: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # of an hour
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_times_core: Amount = 50.0  # how many times faster a GPU generates than one core: measure yours


class Machines(Section):
    """Those that may be taken."""

    currency: str = "USD"
    machines: Annotated[tuple[Machine, ...], Field(min_length=1)]


EXAMPLE = Path(__file__).with_name("machines.yaml")


def machines(path: Path | None = None) -> Machines:
    """Of a file; the example's if there is none. Raises InvalidConfig: names file, key and value."""
    return read_mapping(Machines, path or EXAMPLE)
