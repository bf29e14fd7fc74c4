"""Both clients against one real system, as a program uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from decimal import Decimal
from typing import TypedDict
from urllib.parse import urlsplit

import pytest

from fleetstart.client import AsyncClient, Client, errors
from fleetstart.runtime.contract.ids import new_invocation_id
from tests.client.cutting_proxy import CuttingProxy
from tests.controller.cli.system import System
from tests.servers import wait_until

pytestmark = pytest.mark.e2e

HANDLER = """
import asyncio
import itertools
from fleetstart.runtime import Limits, Response, Scale, context, function

runs = itertools.count(1)
ended = []

@function(scale=Scale(max=1))
def echo(value: int = 1) -> dict[str, int]:
    return {"value": value}

@function(scale=Scale(max=1))
def size(body: bytes) -> int:
    return len(body)

@function(scale=Scale(max=1))
def count_runs() -> int:
    return next(runs)

@function(scale=Scale(max=1), concurrency=2)
async def count(n: int):
    try:
        for number in range(n):
            context.progress(number / n)
            yield {"number": number}
            await asyncio.sleep(0 if n < 100 else 0.05)
    finally:
        ended.append(n)
        if n >= 100:
            print("was left")

@function(scale=Scale(max=1), concurrency=8)
async def square(value: int) -> int:
    if value < 0:
        raise ValueError("no negative numbers")
    await asyncio.sleep(0.01)
    return value * value

@function(scale=Scale(max=1))
async def forever() -> None:
    await asyncio.sleep(1000)

@function(scale=Scale(max=1))
def missing() -> Response:
    return Response("not here", status=404)

@function(scale=Scale(max=1), limits=Limits(rate=2, burst=1))
def limited() -> str:
    return "in time"
"""


class Echoed(TypedDict):
    value: int


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("client")
    (folder / "src").mkdir()
    (folder / "src" / "handler.py").write_text(HANDLER)
    system = System(folder / "home")
    system.up(is_open=False)
    try:
        system.fs("deploy", folder / "src" / "handler.py", "--no-probe")
        yield system
    finally:
        system.down()
    system.assert_gone()


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[Client]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FS_URL", "FS_KEY"):
            patch.delenv(name, raising=False)
        patch.setenv("FS_HOME", str(system.home))
        found = Client()
    with found:
        assert found.url == system.url
        yield found


def test_a_call_gives_the_answer_as_the_type_that_was_asked_for(client: Client) -> None:
    echo = client.function("echo", returns=Echoed)
    assert echo(value=7)["value"] == 7
    assert echo.call({"value": 8}) == {"value": 8}
    assert client.function("size").call(b"\0" * 70_000) == 70_000
    with pytest.raises(errors.InvalidOutput):
        client.function("echo", returns=list[int]).call({"value": 1})


def test_a_result_has_bill_and_timing(client: Client) -> None:
    result = client.function("echo@1").call_with_bill(value=7)
    assert (result.value, result.version, result.status, result.replayed) == ({"value": 7}, 1, 200, False)
    assert result.start in ("hot", "warm", "cold")
    assert result.bill is not None
    assert result.bill.cost >= Decimal(0)
    assert "execute" in result.phases_ms
    assert result.request_id.startswith("inv-")


def test_errors_are_those_of_the_platform(client: Client) -> None:
    with pytest.raises(errors.InvalidInput) as invalid:
        client.function("echo")(value="x")
    assert invalid.value.field == "value"
    with pytest.raises(errors.HandlerFailed, match="no negative numbers"):
        client.function("square")(value=-1)
    with pytest.raises(errors.NotFound):
        client.function("nobody")()
    with pytest.raises(errors.HandlerResponse, match="not here") as own:
        client.function("missing")()
    assert own.value.status == 404
    with pytest.raises(errors.Unauthorized), Client(client.url, "") as stranger:
        stranger.function("echo")()
    with pytest.raises(errors.DeadlineExceeded):
        client.function("forever", timeout_s=1)()


def test_a_call_is_run_once_when_its_connection_is_lost(client: Client, system: System) -> None:
    port = urlsplit(system.url).port
    assert port is not None
    runs = client.function("count-runs")()
    proxy = CuttingProxy(port, cuts=2)
    try:
        with Client(proxy.url, (system.home / "key").read_text().strip()) as other:
            result = other.function("count-runs").call_with_bill()
        assert (result.value, result.replayed) == (runs + 1, True)
        assert proxy.connections == 3
    finally:
        proxy.close()
    assert client.function("count-runs")() == runs + 2


def test_a_key_of_ones_own_holds_over_clients(client: Client) -> None:
    keyed = client.function("count-runs").with_options(idempotency_key=new_invocation_id())
    assert keyed() == keyed()


def test_a_stream_gives_items_then_its_bill(client: Client) -> None:
    stream = client.function("count", returns=dict[str, int]).stream(n=3)
    assert [item["number"] for item in stream] == [0, 1, 2]
    assert stream.bill is not None
    names = [event.name for event in client.function("count").stream(n=2).events()]
    assert "progress" in names
    assert names.count("message") == 2
    assert client.function("count").call(n=2) == [{"number": 0}, {"number": 1}]
    assert list(client.function("echo").stream(value=3)) == [{"value": 3}]
    with pytest.raises(errors.InvalidInput):
        list(client.function("count").stream(n="x"))


def test_leaving_a_stream_ends_its_call(client: Client, system: System) -> None:
    for item in client.function("count").stream(n=100_000):
        assert item == {"number": 0}
        break
    wait_until(lambda: "was left" in system.fs("logs", "count").stdout, what="the handler's end")


def test_a_map_yields_in_order_and_names_the_input_that_failed(client: Client) -> None:
    square = client.function("square", returns=int)
    assert list(square.map(({"value": n} for n in range(50)), concurrency=8)) == [n * n for n in range(50)]
    with pytest.raises(errors.InputFailed, match="no negative numbers") as failed:
        list(square.map([{"value": 2}, {"value": -3}]))
    assert (failed.value.index, failed.value.input) == (1, {"value": -3})
    both = list(square.map([{"value": -3}, {"value": 2}], return_exceptions=True))
    assert isinstance(both[0], errors.InputFailed)
    assert both[1] == 4


def test_a_rejected_call_is_sent_again_when_the_server_says(client: Client) -> None:
    limited = client.function("limited", timeout_s=30)
    assert list(limited.map([{}] * 3, concurrency=3)) == ["in time"] * 3
    with Client(client.url, client_key(client), retries=0) as impatient, pytest.raises(errors.InputFailed) as failed:
        list(impatient.function("limited").map([{}] * 9, concurrency=9))
    assert isinstance(failed.value.__cause__, errors.RateLimited)


def client_key(client: Client) -> str:
    return client._transport.http.headers["authorization"].removeprefix("Bearer ")


def test_an_async_invocation_is_waited_for_found_again_and_cancelled(client: Client) -> None:
    submitted = client.function("square", returns=int).submit(value=12)
    assert submitted.result(timeout_s=30) == 144
    result = client.invocation(submitted.id).result_with_bill(timeout_s=30)
    assert (result.value, result.request_id) == (144, submitted.id)
    assert submitted.status().has_ended
    failed = client.function("square").submit(value=-1)
    with pytest.raises(errors.HandlerFailed):
        failed.result(timeout_s=30)
    endless = client.function("forever").submit()
    with pytest.raises(errors.DeadlineExceeded):
        endless.result(timeout_s=0.1)
    endless.cancel()
    with pytest.raises(errors.FleetError) as cancelled:
        endless.result(timeout_s=30)
    assert cancelled.value.code == "not_answered"


def test_the_same_with_asyncio(client: Client) -> None:
    async def main() -> None:
        async with AsyncClient(client.url, client_key(client)) as server:
            square = server.function("square", returns=int)
            assert await square(value=3) == 9
            assert (await square.call_with_bill({"value": 4})).value == 16
            assert await asyncio.gather(*(square(value=n) for n in range(20))) == [n * n for n in range(20)]
            assert [item async for item in square.map({"value": n} for n in range(20))] == [n * n for n in range(20)]
            async with server.function("count").stream(n=3) as stream:
                assert [item["number"] async for item in stream] == [0, 1, 2]
                assert stream.bill is not None
            submitted = await square.submit(value=5)
            assert await submitted.result(timeout_s=30) == 25
            assert (await server.invocation(submitted.id).status()).status == "succeeded"
            endless = await server.function("forever").submit()
            await endless.cancel()
            with pytest.raises(errors.HandlerFailed):
                await square(value=-1)

    asyncio.run(main())


def test_a_wrong_url_is_told_at_once_and_a_killed_controller_waited_for(client: Client, system: System) -> None:
    with Client("http://127.0.0.1:1") as nowhere, pytest.raises(errors.Unreachable, match="does not answer"):
        nowhere.function("echo")()
    assert client.function("echo")(value=1) == {"value": 1}
    system.kill("controller")
    assert client.function("echo")(value=2) == {"value": 2}
