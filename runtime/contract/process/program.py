"""The beginning and the end of our own processes, where Python spends what no process needs.

The garbage collector looks through modules while they are imported: a tenth of their import's time. At the end Python
frees every module and object by itself, which the kernel does at once: 0.15 s of a core for a controller or a node, and
0.4 s where torch is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn


@contextlib.contextmanager
def uncollected_imports() -> Iterator[None]:
    """Without the collector inside the block; what there is at its end stays for good, and is never looked at again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and ends the process with its exit code: threads are joined, and `atexit` functions that were
    registered since run, as ever; then nothing is freed."""
    code = 1  # of an exception, after its traceback

    def end() -> None:
        logging.shutdown()  # registered at its import, and so not run any more
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, by us or by its reader
                stream.flush()
        os._exit(code)

    atexit.register(end)  # what is registered first runs last
    try:
        code = main() or 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise
    sys.exit(code)
