"""Callers' own passages get the embeddings that the index would hold of them."""

import numpy as np
import pytest

from openbook.config import EncoderSettings, ServedEncoderSettings
from openbook.core.types import Passage
from openbook.errors import InvalidModel, InvalidRequest
from openbook.models.encoder import TextEncoder
from openbook.models.pair import TRY_AGAIN_S, EncoderPair

BELL = Passage(-1, "", "Telephone", "Bell patented the telephone in 1876")
MOON = Passage(-2, "", "Moon", "the Moon goes around the Earth")


def test_own_passages_are_encoded_as_the_index_was() -> None:
    pair = EncoderPair.load(ServedEncoderSettings())
    builder = TextEncoder.load(EncoderSettings(), role="passage")
    assert pair.space == builder.space
    assert pair.fingerprint != builder.fingerprint, "the embedded query encoder is another one"
    for passage in (BELL, MOON):
        ours, its = pair.encode_passages([passage]), builder.encode_passages([passage])
        assert ours.tobytes() == its.tobytes()
    near, far = pair.encode_passages([BELL, MOON]) @ pair.encode_questions(["who patented the telephone?"])[0]
    assert near > far


def test_an_encoder_of_another_space_is_refused_by_name_every_time() -> None:
    pair = EncoderPair.load(ServedEncoderSettings(passage_model="no/such/encoder"))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"encoder\.passage_model: .*no/such/encoder"):
            pair.encode_passages([BELL])
    assert np.isfinite(pair.encode_questions(["who?"])).all()


def test_an_encoder_that_could_not_be_loaded_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = EncoderPair.load(ServedEncoderSettings())
    now, loads = [1000.0], TextEncoder.load
    monkeypatch.setattr("openbook.models.pair.monotonic", lambda: now[0])

    def away(*_: object, **__: object) -> TextEncoder:
        now[0] += 1
        raise InvalidModel("the hub does not answer")

    monkeypatch.setattr(TextEncoder, "load", away)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="the hub does not answer"):
            pair.encode_passages([BELL])
    assert now == [1001.0], "it was asked once"
    monkeypatch.setattr(TextEncoder, "load", loads)
    with pytest.raises(InvalidRequest):
        pair.encode_passages([BELL])
    now[0] += TRY_AGAIN_S
    assert pair.encode_passages([BELL]).shape == (1, pair.dimension)
