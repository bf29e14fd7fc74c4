"""Python client of a fleetstart server: calls functions, reads streams, maps over inputs, submits async calls.

from fleetstart.client import Client

with Client() as client:
    greeting = client.function("hello")(name="Ada")
"""

from fleetstart.runtime.contract.call_format import Bill

from .async_function import AsyncFunction
from .client import AsyncClient, Client
from .errors import FleetError, InputFailed
from .function import Function
from .invocation import AsyncInvocation, Invocation, InvocationStatus
from .result import Result
from .stream import AsyncStream, Stream

__all__ = [
    "AsyncClient",
    "AsyncFunction",
    "AsyncInvocation",
    "AsyncStream",
    "Bill",
    "Client",
    "FleetError",
    "Function",
    "InputFailed",
    "Invocation",
    "InvocationStatus",
    "Result",
    "Stream",
]
