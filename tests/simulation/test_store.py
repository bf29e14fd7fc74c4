"""The simulated Redis against a real one: the same commands and scripts, the same answers, the same data afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from fleetstart.runtime.contract.billing.ledger import append_script
from tests.servers import RedisServer
from tests.simulation.processes import Process
from tests.simulation.store.commands import Commands, Convert, encoded
from tests.simulation.store.server import Server

Operation = tuple[str, tuple[Any, ...], dict[str, Any]]


class Model(Commands):
    """The simulated Redis without a network: it answers at once."""

    def __init__(self) -> None:
        self.server = Server(Process("redis", SimpleNamespace(now_ns=0), random.Random(0)), lambda *_: None)

    def _do(self, command: list[Any], convert: Convert = lambda answer: answer) -> Any:
        (answer,) = self.server.answer([tuple(map(encoded, command))])
        if isinstance(answer, Exception):
            raise answer
        return convert(answer)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    client = redis.Redis.from_url(server.url)
    yield client
    client.close()
    server.close()


KEYS = st.sampled_from(["a", "b"])
FIELDS = st.sampled_from(["f", "g", "h", ""])
VALUES = st.sampled_from([b"", b"1", b"-7", b"x", b"\x00\xff", b"running"])
NUMBERS = st.integers(-3, 12)
BOUNDS = st.one_of(st.sampled_from(["-inf", "+inf", "(3", "(-1"]), NUMBERS)


def operation(
    name: str, *args: st.SearchStrategy[Any], **named: st.SearchStrategy[Any]
) -> st.SearchStrategy[Operation]:
    return st.tuples(st.just(name), st.tuples(*args), st.fixed_dictionaries({}, optional=named))


STRINGS = st.one_of(
    operation("get", KEYS),
    operation("set", KEYS, VALUES, nx=st.booleans(), px=st.sampled_from([60_000, 1 << 40])),
    operation("set", KEYS, VALUES, xx=st.booleans(), keepttl=st.booleans()),
    operation("delete", KEYS, KEYS),
    operation("exists", KEYS, KEYS),
    operation("incrby", KEYS, st.integers(-5, 5)),
    operation("expire", KEYS, st.just(100)),
    operation("eval", st.just("return redis.call('INCR', KEYS[1])"), st.just(1), KEYS),
    operation("eval", st.just("return {redis.call('GET', KEYS[1]), redis.call('EXISTS', KEYS[1]), 'x', 2.9, false, 3}"),
              st.just(1), KEYS),
    operation("eval", st.just("return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])"), st.just(1), KEYS, VALUES,
              st.sampled_from([1 << 40, 0])),
)  # fmt: skip
HASHES = st.one_of(
    operation("hget", KEYS, FIELDS),
    operation("hmget", KEYS, st.lists(FIELDS, min_size=1, max_size=3)),
    operation("hgetall", KEYS),
    operation("hkeys", KEYS),
    operation("hvals", KEYS),
    operation("hlen", KEYS),
    operation("hset", KEYS, FIELDS, VALUES),
    operation("hset", KEYS, mapping=st.dictionaries(FIELDS, VALUES, min_size=1)).filter(lambda one: bool(one[2])),
    operation("hsetnx", KEYS, FIELDS, VALUES),
    operation("hdel", KEYS, FIELDS, FIELDS),
    operation("hincrby", KEYS, FIELDS, NUMBERS),
    operation("hscan", KEYS),
    operation("delete", KEYS),
)
SETS = st.one_of(
    operation("sadd", KEYS, FIELDS, FIELDS),
    operation("srem", KEYS, FIELDS, FIELDS),
    operation("smembers", KEYS),
    operation("exists", KEYS),
)
LISTS = st.one_of(
    operation("rpush", KEYS, VALUES, VALUES),
    operation("lpop", KEYS),
    operation("lpop", KEYS, st.integers(1, 3)),
    operation("ltrim", KEYS, NUMBERS, NUMBERS),
)
SORTED_SETS = st.one_of(
    operation("zadd", KEYS, st.dictionaries(FIELDS, NUMBERS, min_size=1)),
    operation("zrem", KEYS, FIELDS, FIELDS),
    operation("zscore", KEYS, FIELDS),
    operation("zcard", KEYS),
    operation("zrangebyscore", KEYS, BOUNDS, BOUNDS),
    operation("zrangebyscore", KEYS, BOUNDS, BOUNDS, st.integers(0, 2), st.integers(-1, 3),
              withscores=st.booleans()),
    operation("zrevrange", KEYS, NUMBERS, NUMBERS),
    operation("eval", st.just("return redis.call('ZREMRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[2])"), st.just(1), KEYS,
              BOUNDS, BOUNDS),
)  # fmt: skip
STREAMS = st.one_of(
    operation("xadd", KEYS, st.dictionaries(FIELDS, VALUES, min_size=1, max_size=2)),
    operation("xlen", KEYS),
    operation("eval", st.just("return redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[1])"), st.just(1), KEYS,
              st.integers(0, 4)),
)  # fmt: skip
KINDS = {
    "strings": STRINGS,
    "hashes": HASHES,
    "sets": SETS,
    "lists": LISTS,
    "sorted sets": SORTED_SETS,
    "streams": STREAMS,
}
KINDS["any"] = st.one_of(*KINDS.values())


def outcome(client: Any, one: Operation) -> object:
    name, args, named = one
    try:
        answer = getattr(client, name)(*args, **named)
    except ResponseError as error:
        return "wrong type" if "WRONGTYPE" in str(error) else "refused"
    if name == "xadd":
        return "an id"  # ids follow the clock
    return sorted(answer) if isinstance(answer, set) else answer


def contents(client: Any) -> dict[str, object]:
    """All that can be read of the keys, whatever they are."""
    found: dict[str, object] = {}
    for key in "ab":
        for read in ("get", "hgetall", "smembers", "zcard", "xrange"):
            shown: Any = outcome(client, (read, (key,), {}))
            found[f"{read} {key}"] = (
                [entry[1] for entry in shown] if read == "xrange" and shown != "wrong type" else shown
            )
        found[f"list {key}"] = outcome(client, ("eval", ("return redis.call('EXISTS', KEYS[1])", 1, key), {}))
        left_ms = client.pttl(key)
        found[f"expires {key}"] = left_ms if left_ms < 0 else round(left_ms, -5)
    return found


def agree(real: redis.Redis, operations: list[Operation]) -> None:
    real.flushall()
    model = Model()
    for one in operations:
        assert outcome(model, one) == outcome(real, one), one
    assert contents(model) == contents(real)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_answer_as_those_of_a_real_redis(real: redis.Redis, kind: str) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(KINDS[kind], max_size=14))
    def check(operations: list[Operation]) -> None:
        agree(real, operations)

    check()


def lua(name: str) -> str:
    return files("fleetstart.controller").joinpath("state", "lua", f"{name}.lua").read_text()


ROWS = st.sampled_from(["r1", "r2", "r3"])
STAMPS = st.integers(0, 3)


def script(text: str, keys: list[str], *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    return st.tuples(*args).map(lambda drawn: ("eval", (text, len(keys), *keys, *drawn), {}))


LEASE = script(lua("leader_lease"), ["leader", "fence"], st.sampled_from(["x", "y"]), st.sampled_from([0, 1 << 40]),
               st.integers(0, 3))  # fmt: skip
STEP: st.SearchStrategy[Operation] = st.tuples(
    st.integers(0, 3),
    st.lists(
        st.one_of(
            st.tuples(st.just("orders"), st.just("set"), FIELDS, VALUES, st.just("news"), st.just("!")),
            st.tuples(st.just("orders"), st.just("del"), FIELDS, st.just(""), st.just(""), st.just("")),
            st.tuples(st.just("failed"), st.just("fail"), VALUES, st.just("3|77"), st.just(""), st.just("")),
            st.tuples(st.just("failed"), st.just("clear"), st.just(""), st.just(""), st.just("news"), st.just("f")),
        ),
        max_size=3,
    ),
).map(
    lambda drawn: (
        "eval",
        (
            lua("apply_scheduler_step"),
            2 + len(drawn[1]),
            "fence",
            "failing",
            *(write[0] for write in drawn[1]),
            drawn[0],
            *(item for write in drawn[1] for item in write[1:]),
        ),
        {},
    )
)
SWAP = script(lua("compare_and_set"), ["a"], FIELDS, VALUES, VALUES, st.just("news"))
CLAIM = script(lua("idempotency"), ["a"], VALUES, VALUES, st.just(1 << 40))
ROW = script(append_script(), ["rows", "ids", "open", "horizon", "late", "spent"], ROWS, VALUES, STAMPS, FIELDS,
             st.integers(0, 5))  # fmt: skip
STATES = st.sampled_from(["", "queued", "running"])
INVOCATION = script(lua("invocation"), ["a", "due", "functions", "kept", "index", "events", "timers"], ROWS, FIELDS,
                    STATES, STATES, st.sampled_from(["", "call"]), st.sampled_from(["", 5, 7]),
                    st.sampled_from(["", 9]), NUMBERS, NUMBERS, st.just("news"), STATES, st.integers(0, 2))  # fmt: skip
REGISTER = script(lua("registry"), ["a", "versions", "failures", "removals", "last", "logs"], FIELDS, VALUES, VALUES,
                  STAMPS, VALUES, st.just("news"))  # fmt: skip
REMOVE = script(lua("remove_function"), ["a", "versions", "last", "logs", "measures", "failures"], FIELDS, VALUES,
                STAMPS, st.just("news"), st.just(100), FIELDS)  # fmt: skip
LEARN = script(lua("save_estimates"), ["fence", "measures", "learned"], st.integers(0, 2), st.just(100), FIELDS, VALUES)
ALERT = script(lua("budget_alert"), ["alerted", "alerts"], VALUES, st.just(100), st.just(1000))
COMPACT = script(lua("compact"), ["segments", "rows", "ids", "horizon"], STAMPS, VALUES, st.just("99999999999999-0"),
                 STAMPS, STAMPS)  # fmt: skip
SCRIPTS = {
    "the leader's": [LEASE, STEP, LEARN],
    "a record's": [SWAP, REGISTER, REMOVE],
    "the ledger's": [ROW, COMPACT, ALERT],
    "a claim's": [CLAIM],
    "an invocation's": [INVOCATION],
}


@pytest.mark.parametrize("which", SCRIPTS)
def test_scripts_answer_as_in_a_real_redis(real: redis.Redis, which: str) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.one_of(*SCRIPTS[which]), max_size=10))
    def check(operations: list[Operation]) -> None:
        agree(real, operations)
        model = Model()
        for one in operations:
            outcome(model, one)
        everything = sorted(key.decode() for key in real.keys("*"))  # type: ignore[union-attr]
        assert sorted(key.decode() for key in model.server.data.values) == everything

    check()


def test_what_the_model_lacks_is_an_error_and_no_answer() -> None:
    model = Model()
    with pytest.raises(KeyError):
        model.execute_command("GETRANGE", "a", 0, 1)
    with pytest.raises(NotImplementedError):
        model.execute_command("SET", "a", "1", "GET")


def test_scripts_are_gone_after_a_restart_and_so_is_what_was_not_on_the_disk() -> None:
    model = Model()
    sha = model.script_load("return redis.call('HSET', KEYS[1], 'f', '1')")
    model.evalsha(sha, 1, "a")
    model.set("lease", "x", px=5_000)
    model.server.hold_log()
    model.hset("a", "g", "2")
    model.delete("lease")
    assert model.execute_command("WAITAOF", 1, 0, 100) == [0, 0]
    model.server.restart()
    assert model.hgetall("a") == {b"f": b"1"}
    assert model.pttl("lease") == 5_000, "what it has again ends when it would have ended"
    with pytest.raises(ResponseError):
        model.evalsha(sha, 1, "a")


def test_a_server_that_refuses_writes_answers_reads_and_publications() -> None:
    model = Model()
    model.set("a", "1")
    model.server.refuses_writes = True
    assert model.get("a") == b"1"
    assert model.publish("news", "x") == 0
    for refused in (lambda: model.set("a", "2"), lambda: model.eval(lua("compare_and_set"), 1, "h", "f", "", "x", "n")):
        with pytest.raises(ResponseError):
            refused()
    assert model.get("a") == b"1"
