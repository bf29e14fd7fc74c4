"""An async call from the command line: made once, whatever becomes of the connection, and waited for if wanted."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..schemas.invocations import InvocationInfo
from . import output
from .api_client import Server, error_of
from .commands.invocations import show, write_result
from .waiting import ended


def call(
    server: Server,
    method: str,
    target: str,
    content: bytes | None,
    headers: Mapping[str, str],
    *,
    wait_s: float | None,
    as_json: bool,
) -> int:
    """The exit code. It carries a request id, under which the server accepts it once."""
    response = server.repeated(method, target, content=content, headers=headers)
    if response.status_code != 202:
        raise error_of(response.status_code, response.content)
    info = msgspec.json.decode(response.content, type=InvocationInfo)
    if wait_s is None:
        if as_json:
            output.json_data(info)
        else:
            output.data(info.id)
        return output.OK
    if not as_json:
        output.say(info.id)
    info = ended(server, info.id, timeout_s=wait_s)
    if as_json:
        show(info, as_json=True)
        return output.OK if info.status == "succeeded" else output.FAILED
    code = write_result(server, info.id)
    bill = f", billed {info.billed_ms} ms, ${info.cost}" if info.cost else ""
    output.say(f"{info.status}, version {info.version}{bill}")
    return code
