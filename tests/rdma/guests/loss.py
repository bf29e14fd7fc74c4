"""Loss of packets that a guest sends, by its kernel's netem: one direction of the link."""

from __future__ import annotations

import json
import subprocess

TC = "/sbin/tc"
PACKETS = "100000"
"""As the bed's own queue: without loss, none is dropped."""


def set_loss(percent: float) -> int:
    """Loses so many of a hundred packets from now on, at random; how many have been lost until now."""
    lost = _dropped()
    discipline = ("netem", "loss", f"{percent}%") if percent else ("pfifo",)
    _tc("qdisc", "replace", "dev", "eth0", "root", *discipline, "limit", PACKETS)
    return lost


def _dropped() -> int:
    (shown,) = json.loads(_tc("-s", "-j", "qdisc", "show", "dev", "eth0"))
    return int(shown["drops"])


def _tc(*arguments: str) -> str:
    done = subprocess.run([TC, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"tc {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
