"""Errors of decoding: all that msgspec raises for bytes that are not what they should be."""

from __future__ import annotations

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Text that is not UTF-8 and nesting without end have errors of their own. Catch these for bytes of anybody else."""
