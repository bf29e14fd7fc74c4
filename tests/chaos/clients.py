"""Clients of a run under faults: each writes down what it is about to ask and what it was told, and goes on.

They know two gateways and choose by chance. No answer is an answer too: a call that timed out may have run.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from fleetstart.runtime.contract.sse import BILL_EVENT
from tests.chaos.bed import MODEL, MODEL_TOKENS
from tests.chaos.history import Answered, Deployed, Invoked, Kind, Led, Recorder, Revoked, Streamed, now_s
from tests.e2e.pipelines.fleet import PROMPT

TIMEOUT_S = 12.0
"""Longer than a claim lasts, and than any single fault: a call that is answered late is answered."""
TRIES = 6
PAUSE_S = 0.15
ITEMS = 20
GONE = frozenset((410, 502))
"""Answers to one who wants the rest of a stream: neither its events nor its worker are there any more."""
PROBES_S = 6.0
"""For how long a revoked key is tried: twice the bound."""


class Clients:
    """Threads that call; `start`, then `stop`."""

    def __init__(self, urls: list[str], key: str, history: Recorder, seed: int, *, model_text: str = "") -> None:
        """`model_text`: what the language model writes; empty if none is deployed."""
        self._model_text = model_text
        self._urls = {f"gateway-{number}": url for number, url in enumerate(urls)}
        self._key = key
        self._history = history
        self._seed = seed
        self._numbers = itertools.count(1)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.told: Counter[str] = Counter()
        """Answers by kind and status."""

    def start(self, leader: Callable[[], tuple[int, str]]) -> None:
        works: list[tuple[str, Callable[[Client], None], float]] = [
            ("sync", lambda client: client.sync(), PAUSE_S),
            ("sync", lambda client: client.sync(), PAUSE_S),
            ("keyed", lambda client: client.keyed(), PAUSE_S),
            ("keyed", lambda client: client.keyed(), PAUSE_S),
            ("async", lambda client: client.accepted(), 2 * PAUSE_S),
            ("stream", lambda client: client.stream(), PAUSE_S),
            ("revoke", lambda client: client.revoke(), 1.0),
            ("deploy", lambda client: client.deploy(), 5.0),
        ]
        if self._model_text:
            works += [("model", lambda client: client.generate(self._model_text), PAUSE_S)] * 2
        for number, (name, work, pause_s) in enumerate(works):
            self._spawn(name, work, pause_s, random.Random(f"{self._seed}/{number}"))
        self._threads.append(threading.Thread(target=self._watch, args=(leader,), name="leader"))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TRIES * TIMEOUT_S)
            assert not thread.is_alive(), thread.name

    def _spawn(self, name: str, work: Callable[[Client], None], pause_s: float, chance: random.Random) -> None:
        client = Client(self._urls, self._key, self._history, chance, self._numbers, self.told, self._stop)

        def loop() -> None:
            while not self._stop.wait(pause_s):
                work(client)
            client.close()

        self._threads.append(threading.Thread(target=loop, name=name))

    def _watch(self, leader: Callable[[], tuple[int, str]]) -> None:
        last: tuple[int, str] | None = None
        while not self._stop.wait(0.05):
            try:
                seen = leader()
            except Exception:  # Redis is killed or stopped just now
                continue
            if seen != last:
                self._history.write(Led(at_s=now_s(), fence=seen[0], gateway=seen[1]))
                last = seen


class Client:
    """One client; used by one thread."""

    def __init__(
        self,
        urls: dict[str, str],
        key: str,
        history: Recorder,
        chance: random.Random,
        numbers: itertools.count[int],
        told: Counter[str],
        stop: threading.Event,
    ) -> None:
        self._gateways = {
            name: httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_S) for name, url in urls.items()
        }
        self._admin = {"authorization": f"Bearer {key}"}
        self._history = history
        self._chance = chance
        self._numbers = numbers
        self._told = told
        self._stop = stop
        self._spec: dict[str, Any] = {}

    def close(self) -> None:
        for http in self._gateways.values():
            http.close()

    def sync(self) -> None:
        self._call("sync", self._ticket(), self._any())

    def keyed(self) -> None:
        """Calls with one key until it is answered, then once more at another gateway, as a careful client might."""
        ticket = self._ticket()
        for number in range(TRIES):
            if self._call("keyed", ticket, self._any(), key=f"key-{ticket}") == 200:
                break
            if self._stop.wait(0.3 * number):
                return
        if self._chance.random() < 0.5:
            self._call("keyed", ticket, self._any(), key=f"key-{ticket}")

    def accepted(self) -> None:
        self._call("async", self._ticket(), self._any())

    def stream(self) -> None:
        ticket, gateway = self._ticket(), self._any()
        asked = self._invoke("stream", ticket, gateway)
        got: list[str] = []
        status, billed, error, version, request = 0, False, "", 0, asked.request
        headers = {**self._admin, "x-request-id": asked.request}
        event = ""
        try:
            with self._gateways[gateway].stream(
                "POST", "/fn/count", json={"ticket": ticket, "items": ITEMS}, headers=headers
            ) as response:
                status, version = response.status_code, int(response.headers.get("fs-version") or 0)
                request = response.headers.get("x-request-id", request)
                for line in response.iter_lines():
                    if line.startswith("event: "):
                        event = line[7:]
                    elif line.startswith("data: ") and event in ("", "message"):
                        got.append(json.loads(line[6:]))
                    elif line.startswith("data: "):
                        billed, error = billed or event == BILL_EVENT, line[6:] if event == "error" else error
                    elif not line:
                        event = ""
        except (httpx.HTTPError, ValueError) as failure:
            error = repr(failure)
        whole = billed and not error
        if status == 200:
            expected = [f"{ticket}-{number}" for number in range(ITEMS)]
            self._history.write(
                Streamed(at_s=now_s(), call=asked.call, expected=expected, got=got, whole=whole, error=error[:200])
            )
        self._told[f"stream {status if whole or status != 200 else 'cut'}"] += 1
        # The bill of a stream that was cut says what became of it; only a whole one is an answer.
        answer = Answered(
            at_s=now_s(), call=asked.call, status=status if whole or status != 200 else 0, request=request,
            version=version,
        )  # fmt: skip
        self._history.write(answer)

    def generate(self, text: str) -> None:
        """Streams from the language model, and goes on at any gateway after the last event that came."""
        ticket, got, last, status, error, whole = self._ticket(), "", 0, 0, "", False
        asked = self._invoke("stream", ticket, self._any(), key=f"key-{ticket}")
        request = asked.request
        body = {
            "model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": MODEL_TOKENS, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        for number in range(TRIES):
            headers = {**self._admin, "idempotency-key": asked.key, **({"last-event-id": str(last)} if last else {})}
            try:
                with self._gateways[self._any()].stream(
                    "POST", f"/fn/{MODEL}/v1/completions", json=body, headers=headers
                ) as response:
                    status, event, error, here, piece = response.status_code, "", "", last, ""
                    request = response.headers.get("x-request-id", request)
                    if status != 200:
                        error = response.read().decode(errors="replace")
                    for line in response.iter_lines() if status == 200 else ():
                        name, _, value = line.partition(": ")
                        if name == "id":
                            here = int(value)
                        elif name == "event":
                            event = value
                        elif name == "data" and value.startswith("{"):
                            told = json.loads(value)
                            whole = whole or event == BILL_EVENT
                            error = value if event == "error" or "error" in told else error
                            piece += "".join(choice["text"] for choice in told.get("choices", []))
                        elif not line:  # only now the event is whole
                            got, last, event, piece = got + piece, here, "", ""
            except (httpx.HTTPError, ValueError) as failure:
                error = repr(failure)
            if whole or (last and status in GONE) or self._stop.wait(0.3 * number):
                break
        whole = whole and not error
        self._history.write(
            Streamed(at_s=now_s(), call=asked.call, expected=list(text), got=list(got), whole=whole, error=error[:200])
        )
        self._told[f"model {'whole' if whole else f'cut {status}'}"] += 1
        answer = Answered(at_s=now_s(), call=asked.call, status=200 if whole else 0, request=request)
        self._history.write(answer)

    def revoke(self) -> None:
        """Makes a key, sees it work, revokes it, and tries it at all gateways for twice the bound."""
        name = f"app-{next(self._numbers)}"
        first = self._gateways[self._any()]
        try:
            made = first.post("/api/v1/keys", json={"name": name, "rights": ["read"]}, headers=self._admin)
            if made.status_code != 201:
                return
            token = made.json()["key"]
            self._probe(name, token)
            gone = self._gateways[self._any()].delete(f"/api/v1/keys/{name}", headers=self._admin)
        except httpx.HTTPError:
            return
        if gone.status_code != 200:
            return
        self._history.write(Revoked(at_s=now_s(), token=name))
        ends_s = time.monotonic() + PROBES_S
        while time.monotonic() < ends_s and not self._stop.wait(0.25):
            self._probe(name, token)

    def deploy(self) -> None:
        """Deploys the next version: the same bundle with another environment variable."""
        gateway = self._gateways[self._any()]
        try:
            if not self._spec:
                self._spec = (
                    gateway.get("/api/v1/functions/work", headers=self._admin).raise_for_status().json()["spec"]
                )
            spec = {**self._spec, "env": {"DEPLOYED": str(next(self._numbers))}}
            answer = gateway.post("/api/v1/functions", json=spec, headers=self._admin)
        except httpx.HTTPError:
            return
        self._told[f"deploy {answer.status_code}"] += 1
        if answer.status_code in (200, 201):
            version = int(answer.json()["version"])
            self._history.write(Deployed(at_s=now_s(), version=version, function="work"))

    def _probe(self, name: str, token: str) -> None:
        for gateway, http in self._gateways.items():
            asked = self._invoke("probe", "", gateway, token=name)
            try:
                status = http.get(
                    "/api/v1/functions", headers={"authorization": f"Bearer {token}"}, timeout=2.0
                ).status_code
            except httpx.HTTPError:
                status = 0
            self._told[f"probe {status}"] += 1
            self._history.write(Answered(at_s=now_s(), call=asked.call, status=status))

    def _call(self, kind: Kind, ticket: str, gateway: str, *, key: str = "") -> int:
        asked = self._invoke(kind, ticket, gateway, key=key)
        headers = {**self._admin, "x-request-id": asked.request}
        if key:
            headers["idempotency-key"] = key
        if kind == "async":
            headers["prefer"] = "respond-async"
        try:
            response = self._gateways[gateway].post("/fn/work", json={"ticket": ticket}, headers=headers)
            answer = _answer(asked, response)
        except httpx.HTTPError as error:
            answer = Answered(at_s=now_s(), call=asked.call, status=0, text=repr(error)[:200])
        self._told[f"{kind} {answer.status}{' ' + answer.code if answer.code else ''}"] += 1
        self._history.write(answer)
        return answer.status

    def _invoke(self, kind: Kind, ticket: str, gateway: str, *, key: str = "", token: str = "") -> Invoked:
        number = next(self._numbers)
        asked = Invoked(
            at_s=now_s(), call=f"c{number}", kind=kind, gateway=gateway, request=f"chaos-{number}", ticket=ticket,
            key=key, token=token,
        )  # fmt: skip
        self._history.write(asked)
        return asked

    def _ticket(self) -> str:
        return f"t{next(self._numbers)}"

    def _any(self) -> str:
        return self._chance.choice(list(self._gateways))


def _answer(asked: Invoked, response: httpx.Response) -> Answered:
    """Errors: httpx.HTTPError, if the body is none."""
    try:
        body = response.json()
    except ValueError as error:
        raise httpx.DecodingError(f"no JSON: {response.text[:100]!r}") from error
    good = response.status_code == 200
    return Answered(
        at_s=now_s(),
        call=asked.call,
        status=response.status_code,
        request=response.headers.get("x-request-id", ""),
        run=body["run"] if good else 0,
        ticket=body["ticket"] if good else "",
        version=int(response.headers.get("fs-version") or 0),
        replayed=response.headers.get("idempotent-replayed") == "true",
        retaken=response.headers.get("idempotent-retaken") == "true",
        cost=response.headers.get("fs-cost", "") if good else "",
        code="" if good or response.status_code == 202 else body.get("error", {}).get("code", ""),
        text="" if response.status_code < 300 else response.text[:200],
    )
