"""What lives inside a worker, and what a handler imports: `from fleetstart.runtime import function, LLM, Layered, ...`.

Importing this loads next to nothing: user code, the command line and the contract all pass here. What a handler needs
is imported when it is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetstart.runtime.calls import context
    from fleetstart.runtime.contract.errors import InvalidInput
    from fleetstart.runtime.contract.function.spec import SLO, Limits, Scale
    from fleetstart.runtime.declare import LLM, Layered, function
    from fleetstart.runtime.files import File
    from fleetstart.runtime.marks import batched, on_exit
    from fleetstart.runtime.responses import Response

__all__ = [
    "LLM",
    "SLO",
    "File",
    "InvalidInput",
    "Layered",
    "Limits",
    "Response",
    "Scale",
    "batched",
    "context",
    "function",
    "on_exit",
]

_LATE = {
    "LLM": "declare",
    "SLO": "contract.function.spec",
    "File": "files",
    "InvalidInput": "contract.errors",
    "Layered": "declare",
    "Limits": "contract.function.spec",
    "Response": "responses",
    "Scale": "contract.function.spec",
    "batched": "marks",
    "context": "calls",
    "function": "declare",
    "on_exit": "marks",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
