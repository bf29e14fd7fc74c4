"""What lives inside a worker, and what a handler imports: `from fleetstart.runtime import function, LLM, Layered, ...`.

Importing this loads neither torch nor a server: user code, the command line and the contract all pass here.
"""

from fleetstart.runtime.contract.function import SLO, Limits, Scale
from fleetstart.runtime.declare import LLM, Layered, function

__all__ = ["LLM", "SLO", "Layered", "Limits", "Scale", "function"]
