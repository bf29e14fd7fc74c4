"""The modules of a layer that functions import, kept beside the layer on the node's disk.

They come from workers, so from users' code: names are checked, and the numbers of names and functions are bounded.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.function.module_names import MODULES_MAX, is_module_name, shallowest
from fleetstart.runtime.contract.ids import FunctionName

log = logging.getLogger(__name__)

IMPORTS = "imports.json"
FUNCTIONS_MAX = 64
"""Functions of one layer that are remembered, the latest ones."""
FILE_MAX_BYTES = 8 * 1024 * 1024

Imports = dict[FunctionName, list[str]]
_DECODER = msgspec.json.Decoder(Imports)


def read_imports(folder: Path) -> Imports:
    """What is known of a layer, by its folder; nothing if the file is missing or damaged."""
    try:
        with (folder / IMPORTS).open("rb") as file:
            return _DECODER.decode(file.read(FILE_MAX_BYTES))
    except (OSError, *UNDECODABLE):
        return {}


def with_imports(known: Imports, function: FunctionName, modules: list[str]) -> Imports:
    """What is known with a function's modules, which replace those that it had."""
    others = {name: found for name, found in known.items() if name != function}
    latest = list(others.items())[-(FUNCTIONS_MAX - 1) :]
    return dict([*latest, (function, shallowest(filter(is_module_name, modules[: 10 * MODULES_MAX])))])


def learn_imports(folder: Path, function: FunctionName, modules: list[str]) -> None:
    """Writes a function's modules if they have changed. The list only saves time: that it cannot be written is no
    error."""
    known = read_imports(folder)
    wanted = with_imports(known, function, modules)
    if known.get(function) == wanted[function]:
        return
    temporary = folder / f"{IMPORTS}.new"
    try:
        temporary.write_bytes(msgspec.json.encode(wanted))
        os.replace(temporary, folder / IMPORTS)
    except OSError as error:
        log.warning("cannot keep the imports of a layer", extra={"folder": str(folder), "error": str(error)})
