"""Ask a running system with the package `openai`: `openbook up`, `pip install openai`, then

python examples/ask_openai.py "who invented the telephone?" [--server http://127.0.0.1:8000]

The answer as it comes, then the passages that it cites.
"""

import argparse
import os

from openai import OpenAI, OpenAIError

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("question")
parser.add_argument("--server", default="http://127.0.0.1:8000")
options = parser.parse_args()

client = OpenAI(base_url=f"{options.server}/v1", api_key=os.environ.get("OPENBOOK_API_KEY", "none"))
messages = [{"role": "user", "content": options.question}]
try:
    with client.chat.completions.stream(model="openbook", messages=messages) as stream:
        for event in stream:
            if event.type == "content.delta":
                print(event.delta, end="", flush=True)
        print()
    answered = client.chat.completions.create(model="openbook", messages=messages)
except OpenAIError as error:
    raise SystemExit(f"{type(error).__name__}: {error}") from None
for citation in answered.model_extra["citations"]:
    print(f"  {citation}")
