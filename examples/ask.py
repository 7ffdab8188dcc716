"""Ask a running system over gRPC: `openbook up snapshot`, then

python examples/ask.py "who invented the telephone?" [--server 127.0.0.1:9000]

Where the endpoint asks for a key: OPENBOOK_API_KEY.
"""

import argparse
import os
from math import exp

from openbook import Client
from openbook.errors import OpenbookError

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("question")
parser.add_argument("--server", default="127.0.0.1:9000")
options = parser.parse_args()

try:
    with Client(options.server, timeout_s=60, api_key=os.environ.get("OPENBOOK_API_KEY")) as client:
        response = client.answer(options.question, k=3)
except OpenbookError as error:
    raise SystemExit(f"{type(error).__name__}: {error}") from None

print(f"{response.text}   p(y|x) = {exp(response.log_likelihood):.3f}")
for evidence in response.evidence:
    prior, posterior = exp(evidence.log_prior), exp(evidence.log_posterior)
    print(f"  prior {prior:.3f}  posterior {posterior:.3f}  {evidence.passage.title}")
