"""Published query encoders that are one of a pair, and do not say of which: DPR's, RAG's, and sentence-transformers'
copies of DPR's. `encoder.passage_model` says it of others.
"""

import re

_DPR = re.compile(r"(facebook/|sentence-transformers/facebook-)dpr-question_encoder-(single-nq|multiset)-base")
_RAG = re.compile(r"facebook/rag-(sequence|token)-(base|nq)")


def passage_model_of(name: str) -> str:
    """The encoder of the passages that a published query encoder was trained to find; empty where none is known.

    RAG's began as DPR's of Natural Questions, whose passage encoder stayed as it was (Lewis et al. 2020, section 2.4).
    """
    if _RAG.fullmatch(name):
        return "facebook/dpr-ctx_encoder-single-nq-base"
    return name.replace("-question_encoder-", "-ctx_encoder-") if _DPR.fullmatch(name) else ""
