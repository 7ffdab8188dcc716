"""What was fitted to a generator's answers, beside it: `confidence.json`, which `openbook calibrate` writes."""

from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from openbook.core.confidence import SIGNALS, UNFITTED, Calibration, Curve
from openbook.core.types import Formulation
from openbook.errors import InvalidModel
from openbook.models.embedded import reader_folder
from openbook.models.source import Source

CONFIDENCE: Final = "confidence.json"


class Confidence(BaseModel):
    """The file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generator_fingerprint: str
    signals: tuple[str, ...] = SIGNALS
    curves: dict[Formulation, Curve]


def load_calibration(name: str, fingerprint: str) -> Calibration:
    """That of the generator of this name; empty where none was fitted.

    Raises:
        InvalidModel: the file is not as it must be, or was fitted to another generator than that of this fingerprint.
    """
    read = Source.find(name, reader_folder).json(CONFIDENCE)
    if read is None:
        return UNFITTED
    try:
        found = Confidence.model_validate(read)
    except ValidationError as error:
        raise InvalidModel(f"model {name!r}: {CONFIDENCE}: {error}") from None
    if (found.generator_fingerprint, found.signals) != (fingerprint, SIGNALS):
        fitted = f"fitted to generator {found.generator_fingerprint} by {', '.join(found.signals)}"
        raise InvalidModel(
            f"model {name!r}: {CONFIDENCE} was {fitted}, this is {fingerprint}: fit it again, or remove it"
        )
    return found.curves
