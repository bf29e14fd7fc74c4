"""The gateway's HTTP client: what it does when a worker's connection breaks."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from fleetstart.controller.http.client import open_session


def test_no_method_is_sent_again_when_a_kept_connection_breaks() -> None:
    """A worker that dies of a GET has seen it: only the gateway decides whether another one does."""
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await reader.readuntil(b"\r\n\r\n")
        requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        requests += 1
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with server, open_session() as session:
            async with session.get(url) as first:
                assert first.status == 200
            with pytest.raises(aiohttp.ClientError):
                await session.get(url)

    asyncio.run(main())
    assert requests == 2
