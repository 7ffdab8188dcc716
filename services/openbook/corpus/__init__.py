"""Documents to passages to embeddings, ready for the index tier to build a snapshot from."""

from importlib import resources
from pathlib import Path


def embedded_documents() -> Path:
    """The corpus shipped with openbook: about 9,300 passages of Wikipedia."""
    return Path(str(resources.files("openbook") / "embedded/corpus/documents.jsonl.gz"))
