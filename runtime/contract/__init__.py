"""The contract between processes: function spec, manifest, messages, errors, keys, timeline, ledger.

Imports the standard library and msgspec, nothing else. Import from the modules, for example
`from fleetstart.runtime.contract.weights.manifest import Manifest`: a process loads only what it speaks.
"""

__all__: list[str] = []
