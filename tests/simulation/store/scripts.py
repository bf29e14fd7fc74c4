"""Lua scripts of the product, run by a Lua 5.1 interpreter as Redis runs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from lupa import lua51
from redis.exceptions import NoScriptError, ResponseError

Call = Callable[[bytes, list[bytes]], Any]


class _Interpreter:
    """One interpreter of this process, and the functions that were compiled. Scripts keep nothing between two calls."""

    def __init__(self) -> None:
        self._lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False)
        self._functions: dict[bytes, Any] = {}
        self._call: Call = _no_store
        self._table = self._lua.table_from
        self._lua.globals()[b"python_call"] = self._redis_call
        self._lua.globals()[b"python_pcall"] = self._redis_pcall
        self._lua.execute(
            b"redis = {call = function(...) return python_call(...) end,"
            b" pcall = function(...) return python_pcall(...) end}"
        )

    def run(self, text: bytes, keys: Sequence[bytes], args: Sequence[bytes], call: Call) -> Any:
        function = self._functions.get(text)
        if function is None:
            function = self._lua.eval(b"function(KEYS, ARGV)\n" + text + b"\nend")
            self._functions[text] = function
        before, self._call = self._call, call
        try:
            return _reply(function(self._table(keys), self._table(args)))
        finally:
            self._call = before

    def _redis_call(self, command: bytes, *args: bytes | int | float) -> Any:
        texts = [arg if type(arg) is bytes else _number(arg) for arg in args]  # type: ignore[arg-type]
        name = command.upper()
        reply = self._call(name, texts)
        if reply is None:
            return False
        kind = type(reply)
        if kind is list:
            return self._table([False if one is None else one for one in reply])
        if reply == b"OK" and name in (b"SET", b"LTRIM"):
            return self._table({b"ok": reply})
        return reply

    def _redis_pcall(self, command: bytes, *args: bytes | int | float) -> Any:
        try:
            return self._redis_call(command, *args)
        except ResponseError as error:
            return self._table({b"err": str(error).encode()})


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


def _reply(value: Any) -> Any:
    """What Redis answers for a value of Lua."""
    kind = type(value)
    if kind is bytes:
        return value
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if kind is float or kind is int:
        return int(value)
    if value[b"ok"] is not None:
        return value[b"ok"]
    return [_reply(value[index]) for index in range(1, len(value) + 1)]
