"""Handler API: the names that a handler's file imports from `fleetstart.runtime`.

    from fleetstart.runtime import Response, context, function

    @function(memory="256MiB", timeout_s=10)
    def greet(name: str = "you") -> str:
        return f"hello {name}"

The package also holds everything that runs inside a worker. Importing it loads next to nothing, since user code, the
command line and the contract all import it: each name is loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contract.call_format import HandlerResponse
    from .contract.errors import FleetError, InvalidInput
    from .contract.function.spec import SLO, Limits, Scale
    from .sdk.calls import acall, call
    from .sdk.context import context
    from .sdk.declarations import LLM, Layered, Transformers, function
    from .sdk.decorators import batched, on_exit
    from .sdk.files import File
    from .sdk.responses import Response
    from .sdk.volumes import VolumeConflict, VolumeError, volume

__all__ = [
    "LLM",
    "SLO",
    "File",
    "FleetError",
    "HandlerResponse",
    "InvalidInput",
    "Layered",
    "Limits",
    "Response",
    "Scale",
    "Transformers",
    "VolumeConflict",
    "VolumeError",
    "acall",
    "batched",
    "call",
    "context",
    "function",
    "on_exit",
    "volume",
]

_LAZY = {
    "LLM": "sdk.declarations",
    "SLO": "contract.function.spec",
    "File": "sdk.files",
    "FleetError": "contract.errors",
    "HandlerResponse": "contract.call_format",
    "InvalidInput": "contract.errors",
    "Layered": "sdk.declarations",
    "Limits": "contract.function.spec",
    "Response": "sdk.responses",
    "Scale": "contract.function.spec",
    "Transformers": "sdk.declarations",
    "VolumeConflict": "sdk.volumes",
    "VolumeError": "sdk.volumes",
    "acall": "sdk.calls",
    "batched": "sdk.decorators",
    "call": "sdk.calls",
    "context": "sdk.context",
    "function": "sdk.declarations",
    "on_exit": "sdk.decorators",
    "volume": "sdk.volumes",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
