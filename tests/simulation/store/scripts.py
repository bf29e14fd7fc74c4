"""Lua scripts of the product, run by a Lua 5.1 interpreter as Redis runs them.

What passes between Lua and Python is bytes and numbers, many at once: a table is one value after the other, as making
one from the other's side costs a call for each of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lupa import lua51
from redis.exceptions import NoScriptError, ResponseError

Call = Callable[[bytes, list[bytes]], Any]

BRIDGE = b"""
local call, protected = python_call, python_pcall

-- What Redis answered: a list comes after true, a status after nil, an error after nil and false.
local function value(first, second, ...)
    if first == true then
        return {second, ...}
    elseif first ~= nil then
        return first
    elseif second ~= false then
        return {ok = second}
    end
    return {err = ...}
end

redis = {
    call = function(...) return value(call(...)) end,
    pcall = function(...) return value(protected(...)) end,
}

-- A table becomes true, its size, and its values; what is false or nil becomes false.
local function flatten(one, flat, count)
    if one == nil or one == false then
        flat[count + 1] = false
    elseif one == true then
        flat[count + 1] = 1
    elseif type(one) ~= 'table' then
        flat[count + 1] = one
    elseif one.ok ~= nil then
        flat[count + 1] = one.ok
    else
        local size = #one
        flat[count + 1], flat[count + 2] = true, size
        count = count + 2
        for index = 1, size do
            count = flatten(one[index], flat, count)
        end
        return count
    end
    return count + 1
end

return function(script, count, ...)
    local keys, args = {}, {...}
    if count > 0 then
        args = {select(count + 1, ...)}
        for index = 1, count do
            keys[index] = (select(index, ...))
        end
    end
    local one = script(keys, args)
    if one == true then
        return 1
    elseif type(one) ~= 'table' then
        return one
    end
    local flat = {}
    return unpack(flat, 1, flatten(one, flat, 0))
end
"""


class _Interpreter:
    """One interpreter of this process, and the functions that were compiled. Scripts keep nothing between two calls."""

    def __init__(self) -> None:
        self._lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False)
        self._functions: dict[bytes, Any] = {}
        self._call: Call = _no_store
        self._lua.globals()[b"python_call"] = self._redis_call
        self._lua.globals()[b"python_pcall"] = self._redis_pcall
        self._run = self._lua.execute(BRIDGE)

    def run(self, text: bytes, keys: Sequence[bytes], args: Sequence[bytes], call: Call) -> Any:
        function = self._functions.get(text)
        if function is None:
            function = self._lua.eval(b"function(KEYS, ARGV)\n" + text + b"\nend")
            self._functions[text] = function
        before, self._call = self._call, call
        try:
            answer = self._run(function, len(keys), *keys, *args)
        finally:
            self._call = before
        if type(answer) is tuple:
            values = iter(answer)
            return _reply(next(values), values)
        return _reply(answer, iter(()))

    def _redis_call(self, command: bytes, *args: bytes | int | float) -> Any:
        texts = [arg if type(arg) is bytes else _number(arg) for arg in args]  # type: ignore[arg-type]
        name = command if command.isupper() else command.upper()
        reply = self._call(name, texts)
        if reply is None:
            return False
        if type(reply) is list:
            return (True, *[False if one is None else one for one in reply])
        if reply == b"OK" and name in (b"SET", b"LTRIM"):
            return (None, reply)
        return reply

    def _redis_pcall(self, command: bytes, *args: bytes | int | float) -> Any:
        try:
            return self._redis_call(command, *args)
        except ResponseError as error:
            return (None, False, str(error).encode())


def _no_store(command: bytes, args: list[bytes]) -> Any:
    raise AssertionError("no script runs")


_INTERPRETER: list[_Interpreter] = []


class Scripts:
    """The scripts that one Redis has loaded."""

    def __init__(self) -> None:
        self._loaded: dict[bytes, bytes] = {}

    def load(self, text: bytes) -> bytes:
        sha = hashlib.sha1(text).hexdigest().encode()
        self._loaded[sha] = text
        return sha

    def flush(self) -> None:
        self._loaded.clear()

    def text(self, sha: bytes) -> bytes:
        """Errors: NoScriptError."""
        if sha not in self._loaded:
            raise NoScriptError("No matching script. Please use EVAL.")
        return self._loaded[sha]

    def run(self, text: bytes, keys: Sequence[bytes], args: Sequence[bytes], call: Call) -> Any:
        """Errors: those of `call`; ResponseError."""
        if not _INTERPRETER:
            _INTERPRETER.append(_Interpreter())
        try:
            return _INTERPRETER[0].run(text, keys, args, call)
        except lua51.LuaError as error:
            raise ResponseError(str(error)) from error


def _number(number: int | float) -> bytes:
    return b"%d" % number if number == int(number) else b"%.17g" % number


def _reply(value: Any, more: Iterator[Any]) -> Any:
    """The answer of Redis for a value of Lua, of which this is the beginning."""
    kind = type(value)
    if kind is bytes:
        return value
    if value is True:
        return [_reply(next(more), more) for _ in range(next(more))]
    if value is None or value is False:
        return None
    return int(value)
