"""A connection that sends a byte a second, as benchmarks of attacks make many of them."""

import asyncio
from contextlib import suppress


async def send_slowly(port: int, begin: bytes) -> None:
    """Send this, then a byte a second, until the other side has had enough. Raises OSError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(begin)
        while not reader.at_eof() and not writer.is_closing():
            writer.write(b"x")
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1000), 1)
    finally:
        writer.close()
