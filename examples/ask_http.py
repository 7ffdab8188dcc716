"""Ask a running system over HTTP with the standard library alone: `openbook up snapshot`, then

python examples/ask_http.py "who invented the telephone?" [--server http://127.0.0.1:8000]

Where the endpoint asks for a key: OPENBOOK_API_KEY.
"""

import argparse
import json
import os
import urllib.error
import urllib.request
from http.client import HTTPException

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("question")
parser.add_argument("--server", default="http://127.0.0.1:8000")
options = parser.parse_args()

body = json.dumps({"question": options.question, "k": 3, "timeout_s": 60}).encode()
headers = {"Content-Type": "application/json"}
if key := os.environ.get("OPENBOOK_API_KEY"):
    headers["Authorization"] = f"Bearer {key}"
try:
    request = urllib.request.Request(f"{options.server.rstrip('/')}/v1/answer", body, headers)
    with urllib.request.urlopen(request) as reply:
        answer = json.load(reply)
except urllib.error.HTTPError as refused:
    try:
        problem = json.load(refused)
        raise SystemExit(f"{problem['code']}: {problem['detail']} (request {problem['request_id']})") from None
    except (ValueError, LookupError, TypeError):  # of some other web server
        raise SystemExit(f"{options.server}: {refused}") from None
except (OSError, HTTPException, ValueError) as error:  # nobody, or what speaks no HTTP, or no URL
    raise SystemExit(f"{options.server}: {getattr(error, 'reason', error)}") from None

if not isinstance(answer, dict) or "answer" not in answer:
    raise SystemExit(f"{options.server}: gives no answer")
print(answer["answer"])
for evidence in answer["evidence"]:
    print(f"  score {evidence['score']:.3f}  {evidence['passage']['title']}: {evidence['passage']['text'][:60]}")
