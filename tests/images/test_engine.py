"""Client of the engine that builds images: what an engine may answer, and what is made of it."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fleetstart.images.engine import ImageEngine, ImageEngineError

STEP = b'{"stream":"Step 1/2 : FROM base"}\r\n'

IMAGE = {"Id": "sha256:1", "RepoTags": ["a:1"], "Size": 5, "Config": {"Labels": None}}


class Engine(BaseHTTPRequestHandler):
    """An engine with one image. The log of its builds is `log`, and ends in the middle if `cut`."""

    protocol_version = "HTTP/1.1"
    log: bytes = STEP
    cut = False

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        found = {"ApiVersion": "1.44"} if self.path.endswith("/version") else IMAGE
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(self.log), self.log))
        if not self.cut:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True


@pytest.fixture
def engine() -> type[Engine]:
    return type("OneEngine", (Engine,), {})


@pytest.fixture
def client(engine: type[Engine]) -> Iterator[ImageEngine]:
    with ThreadingHTTPServer(("127.0.0.1", 0), engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = ImageEngine(f"tcp://127.0.0.1:{server.server_port}")
        yield client
        client.close()
        server.shutdown()


def build(client: ImageEngine) -> list[str]:
    lines: list[str] = []
    client.build("a:1", io.BytesIO(b"context"), arguments={}, labels={}, progress=lines.append)
    return lines


def test_the_log_of_a_build_is_told(client: ImageEngine) -> None:
    assert build(client) == ["Step 1/2 : FROM base"]


@pytest.mark.parametrize(("log", "cut"), [(STEP, True), (b"<html>", False)], ids=["cut", "no JSON"])
def test_an_engine_that_ends_in_the_middle_of_a_build_is_an_error_of_the_engine(
    engine: type[Engine], client: ImageEngine, log: bytes, cut: bool
) -> None:
    engine.log, engine.cut = log, cut
    with pytest.raises(ImageEngineError, match="could not build a:1"):
        build(client)


def test_an_image_without_a_time_is_found(client: ImageEngine) -> None:
    found = client.find("a:1")
    assert found is not None
    assert (found.id, found.created_unix_s) == ("sha256:1", 0.0)
