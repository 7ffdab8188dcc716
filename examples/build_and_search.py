"""Own documents to a snapshot to passages, without a server: the index as a library.

    python examples/build_and_search.py "who invented the telephone?"

Any encoder whose inner products mean something will do; the one here counts words, and needs no model.
"""

import argparse
import tempfile
from pathlib import Path

from openbook.core.deadline import Deadline
from openbook.core.passages import split_words
from openbook.core.types import Passage
from openbook.index.building.build import build_snapshot
from openbook.index.shard.shard import Shard
from openbook.testing import HashEncoder

DOCUMENTS = {
    "Alexander Graham Bell": "Alexander Graham Bell was awarded a patent for the telephone, which he invented in 1876.",
    "Marie Curie": "Marie Curie was a physicist who was born in Warsaw in 1867 and moved to Paris.",
    "Nile": "The Nile is a river in northeastern Africa. It flows north into the Mediterranean Sea.",
}

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("question")
question = parser.parse_args().question

pieces = [(title, text) for title, whole in DOCUMENTS.items() for text in split_words(whole, 100)]
passages = [Passage(number, title, title, text) for number, (title, text) in enumerate(pieces)]
encoder = HashEncoder(256)

with tempfile.TemporaryDirectory() as folder:
    snapshot = Path(folder) / "snapshot"
    vectors = encoder.encode_passages(passages)  # (n, d) float32
    build_snapshot(passages, vectors, snapshot, 1, "Flat", "hash", encoder.fingerprint)
    shard = Shard(snapshot, 0)
    hits = shard.search(encoder.encode_questions([question]), 2, Deadline.never())
    for passage, score in zip(shard.fetch(hits.ids[0]), hits.scores[0], strict=True):
        print(f"{score:.3f}  {passage.title}: {passage.text}")
