"""Ask a running system several questions at once: `openbook up`, then

python examples/ask_async.py "who invented the telephone?" "where was Marie Curie born?" [--server 127.0.0.1:9000]

Each answer with the passages that its words rest on. Where the endpoint asks for a key: OPENBOOK_API_KEY.
"""

import argparse
import asyncio
import os

from openbook import AsyncClient
from openbook.client import Answer
from openbook.errors import OpenbookError


def show(question: str, answer: Answer) -> None:
    print(f"{question}  {answer.text}")
    for part in answer.citations:
        passage = answer.evidence[part.evidence].passage
        print(f"  {answer.text[part.start : part.end]!r} rests on {passage.title!r} with {part.probability:.3f}")


async def main(questions: list[str], server: str) -> None:
    async with AsyncClient(server, timeout_s=60, api_key=os.environ.get("OPENBOOK_API_KEY")) as client:
        asked = (client.answer(question, k=3, tokens=True) for question in questions)
        for question, answer in zip(questions, await asyncio.gather(*asked), strict=True):
            show(question, answer)


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("questions", nargs="+")
parser.add_argument("--server", default="127.0.0.1:9000")
options = parser.parse_args()
try:
    asyncio.run(main(options.questions, options.server))
except OpenbookError as error:
    raise SystemExit(f"{type(error).__name__}: {error}") from None
