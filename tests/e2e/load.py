"""Steady load of calls by careful clients: a call that was not answered is retried under the same id."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from tests.e2e.systems import System
from tests.servers import NO_CERTIFICATES, wait_until

DEADLINE_S = 20.0
"""Of one call, with all its tries."""
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    request: str
    status: int
    """0: none came within the deadline."""
    text: str
    began_s: float
    took_s: float
    tries: int


class Load:
    def __init__(self, system: System, function: str, *, clients: int) -> None:
        self._url = f"{system.url}/fn/{function}"
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, name=f"client-{i}") for i in range(clients)]
        self.answers: list[Answer] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Answer]:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S + 5)
            assert not thread.is_alive()
        return self.answers

    def wait_for(self, more: int, *, deadline_s: float = DEADLINE_S) -> None:
        """Waits until so many more calls have been answered."""
        enough = len(self.answers) + more
        wait_until(lambda: len(self.answers) >= enough, deadline_s, what=f"{more} more calls")

    def _client(self) -> None:
        with httpx.Client(trust_env=False, timeout=DEADLINE_S, verify=NO_CERTIFICATES) as http:
            while not self._stop.is_set():
                self.answers.append(self._call(http))

    def _call(self, http: httpx.Client) -> Answer:
        request = f"load-{secrets.token_hex(8)}"
        began_s = time.monotonic()
        tries = 0
        status, text = 0, "no answer"
        while time.monotonic() - began_s < DEADLINE_S:
            tries += 1
            try:
                response = http.post(self._url, json={}, headers={"x-request-id": request})
            except httpx.TransportError as error:
                text = repr(error)
                time.sleep(PAUSE_S)
                continue
            request = response.headers["x-request-id"]
            status, text = response.status_code, response.text
            break
        return Answer(request, status, text, began_s, time.monotonic() - began_s, tries)


@contextmanager
def loaded(system: System, function: str, *, clients: int = 4) -> Iterator[Load]:
    """Calls go on through the whole block; they have all ended when it is left."""
    load = Load(system, function, clients=clients)
    load.start()
    try:
        yield load
    finally:
        load.stop()
