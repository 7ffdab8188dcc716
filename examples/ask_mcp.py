"""Search a running system and read what was found, as an MCP client: `openbook up`, `pip install mcp`, then

python examples/ask_mcp.py "who invented the telephone?" [--server http://127.0.0.1:8000]
"""

import argparse
import asyncio
import json

from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client


async def main(question: str, server: str) -> None:
    async with (
        streamablehttp_client(f"{server}/mcp") as (incoming, outgoing, _),
        ClientSession(incoming, outgoing) as session,
    ):
        await session.initialize()
        found = await session.call_tool("search", {"query": question})
        results = json.loads(found.content[0].text)["results"]
        print(f"{len(results)} passages")
        document = await session.call_tool("fetch", {"id": results[0]["id"]})
        print(f"  {json.loads(document.content[0].text)['title']}")
        answer = await session.call_tool("answer", {"question": question})
        print(answer.content[0].text)


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("question")
parser.add_argument("--server", default="http://127.0.0.1:8000")
options = parser.parse_args()
asyncio.run(main(options.question, options.server))
