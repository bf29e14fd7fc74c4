"""Calls through nginx and Caddy, configured as `examples/deploy` has it but for ports, names and certificates."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from tests.docs.pages import ROOT
from tests.e2e.systems import System, running
from tests.servers import end, free_port, spawn, wait_until
from tests.tls.certificates import self_signed

CALLER = "127.0.0.2"
"""Address of the client: the proxy's own is another."""
LARGE = bytes(range(256)) * 80_000  # 20 MB, where proxies allow 1 MB unless told otherwise
WEB = """
import asyncio, hashlib
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from fleetstart.runtime import function

read = asyncio.Event()

async def seen(request):
    return JSONResponse({"url": str(request.url), "headers": dict(request.headers)})

async def size(request):
    return PlainTextResponse(hashlib.sha256(await request.body()).hexdigest())

async def events(request):
    async def pieces():
        yield "data: first\\n\\n"
        await read.wait()
        yield "data: second\\n\\n"
    return StreamingResponse(pieces(), media_type="text/event-stream")

async def has_read(request):
    read.set()
    return PlainTextResponse("")

async def echo(socket):
    await socket.accept()
    async for text in socket.iter_text():
        await socket.send_text(text + " from " + socket.headers["x-forwarded-for"])

ROUTES = [Route("/seen/", seen), Route("/size", size, methods=["POST"]), Route("/events", events),
          Route("/has-read", has_read), WebSocketRoute("/echo", echo)]
web = function(memory="256MiB", concurrency=4)(Starlette(routes=ROUTES))
"""
NGINX = """
daemon off;
user {user};
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {included};
}}
"""
CADDY = """
{{
    admin off
    auto_https disable_redirects
    storage file_system {folder}
}}
{site}
"""


@dataclass(frozen=True)
class Proxied:
    """A system behind a proxy."""

    system: System
    url: str
    key: str
    http: httpx.Client
    tls: ssl.SSLContext


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python"}) as system:
        system.deploy(WEB, name="web")
        yield system


@pytest.fixture(scope="module")
def key(system: System) -> str:
    return system.fs("key", "create", "admin", "--scope", "admin").out.strip().splitlines()[-1]


@pytest.fixture(params=["nginx", "caddy"])
def proxied(request: pytest.FixtureRequest, system: System, key: str, tmp_path: Path) -> Iterator[Proxied]:
    program = shutil.which(request.param, path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip(f"no {request.param}")
    certificate, key_file = self_signed(tmp_path)
    port, upstream = free_port(), system.url.removeprefix("http://")
    make = nginx if request.param == "nginx" else caddy
    argv = [program, *make(tmp_path, port, upstream, certificate, key_file)]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    with (tmp_path / "proxy.log").open("wb") as log:
        process = spawn(argv, stdout=subprocess.DEVNULL, stderr=log, env=env)
    tls = ssl.create_default_context(cafile=certificate)
    from_elsewhere = httpx.HTTPTransport(verify=tls, local_address=CALLER)
    url = f"https://localhost:{port}"
    try:
        with httpx.Client(base_url=url, transport=from_elsewhere, headers={"fs-key": key}, timeout=60) as http:
            wait_until(lambda: _answers(http), what=f"{request.param}, whose log is in {tmp_path}")
            yield Proxied(system, url, key, http, tls)
    finally:
        end(process)


def nginx(folder: Path, port: int, upstream: str, certificate: Path, key_file: Path) -> list[str]:
    text = (ROOT / "examples" / "deploy" / "nginx.conf").read_text()
    for old, new in (
        ("server 127.0.0.1:7433;", f"server {upstream};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("/etc/fleetstart/fullchain.pem", str(certificate)),
        ("/etc/fleetstart/privkey.pem", str(key_file)),
        ("fleet.example.com", "localhost"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "site.conf").write_text(text)
    user = "root" if os.geteuid() == 0 else "nobody"
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, included=folder / "site.conf", user=user))
    return ["-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, port: int, upstream: str, certificate: Path, key_file: Path) -> list[str]:
    text = (ROOT / "examples" / "deploy" / "Caddyfile").read_text()
    for old, new in (
        ("fleet.example.com {", f"https://localhost:{port} {{\n\tbind 127.0.0.1\n\ttls {certificate} {key_file}"),
        ("127.0.0.1:7433", upstream),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "Caddyfile").write_text(CADDY.format(folder=folder, site=text))
    return ["run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_a_stream_comes_event_by_event(proxied: Proxied) -> None:
    """Its second event waits until the first was read: a proxy that gathers a response would wait for ever."""
    with proxied.http.stream("GET", "/fn/web/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert next(lines) == "data: first"
        ended = threading.Event()
        told = threading.Thread(target=_tell, args=(proxied, ended))
        told.start()
        assert "data: second" in list(lines)
        told.join(30)
        assert ended.is_set()


def _tell(proxied: Proxied, ended: threading.Event) -> None:
    if proxied.http.get("/fn/web/has-read").status_code == 200:
        ended.set()


def test_websockets_pass(proxied: Proxied) -> None:
    url = proxied.url.replace("https://", "wss://") + "/fn/web/echo"
    headers = {"fs-key": proxied.key}
    source = (CALLER, 0)
    with connect(url, ssl=proxied.tls, additional_headers=headers, proxy=None, source_address=source) as socket:
        for text in ("one", "two"):
            socket.send(text)
            assert socket.recv(timeout=30) == f"{text} from {CALLER}"


def test_a_large_body_passes_and_an_error_stays_as_it_is(proxied: Proxied) -> None:
    answer = proxied.http.post("/fn/web/size", content=LARGE)
    assert answer.text == hashlib.sha256(LARGE).hexdigest()
    missing = proxied.http.get("/fn/nosuch")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


def test_the_callers_address_and_protocol_are_known_and_cannot_be_forged(proxied: Proxied) -> None:
    forged = {"x-forwarded-for": "6.6.6.6", "x-forwarded-proto": "http"}
    redirect = proxied.http.get("/fn/web/seen", headers=forged)
    assert redirect.headers["location"] == f"{proxied.url}/fn/web/seen/"
    seen = proxied.http.get("/fn/web/seen/", headers=forged).json()
    assert seen["url"] == f"{proxied.url}/fn/web/seen/"
    assert seen["headers"]["x-forwarded-for"] == CALLER
    assert seen["headers"]["x-forwarded-proto"] == "https"
    assert proxied.http.put("/api/v1/functions/web/scale", json={"max": 3}, headers=forged).status_code == 200
    latest = proxied.http.get("/api/v1/audit", params={"limit": 1}).json()[0]
    assert latest["address"] == CALLER


def test_without_a_key_nothing_passes(proxied: Proxied) -> None:
    answer = httpx.get(f"{proxied.url}/fn/web/seen/", verify=proxied.tls, trust_env=False)
    assert answer.status_code == 401
    assert re.search(r"key", answer.json()["error"]["message"])
