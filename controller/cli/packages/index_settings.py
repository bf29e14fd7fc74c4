"""The environment of a build: what uv needs of this machine's, pip's index settings in uv's names, and no secret.

uv does not read pip's settings. Where a machine has them (`PIP_INDEX_URL`, pip.conf) and none of uv's, they are passed
on, so that a build finds its packages where `pip install` finds them.
"""

from __future__ import annotations

import configparser
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

KEPT = (
    *("PATH", "HOME", "USER", "LANG", "LC_", "TMPDIR", "XDG_", "NETRC", "LD_LIBRARY_PATH", "UV_"),
    *("SSL_CERT_", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS"),
)
"""Prefixes of the variables that a build sees: compilers, proxies, certificates and uv's own settings."""
_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""pip's setting → uv's variable."""
_OLDER = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}
"""uv's variables that have another name too: either keeps pip's setting out."""


def build_environment(env: Mapping[str, str], pip: Mapping[str, str], secrets: Collection[str] = ()) -> dict[str, str]:
    """The environment of a build. `pip`: pip's settings; `secrets`: names that the function gets as secrets."""
    kept = {name: value for name, value in env.items() if name.startswith(KEPT) and name not in secrets}
    for setting, name in _NAMES.items():
        value = pip.get(setting, "")
        if not value or name in kept or _OLDER.get(name) in kept:
            continue
        words = value.split()
        kept[name] = ",".join(words) if name == "UV_FIND_LINKS" else " ".join(words)
        if name == "UV_INDEX":
            # pip takes the best version of all its indexes, uv those of the first one that has the package.
            kept.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    # The Python of this environment, and no other that uv would find or download; not this checkout's settings.
    return kept | {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1", "PYTHONHASHSEED": "0"}


def pip_settings(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """pip's settings of this machine: its files in pip's order, then its variables, of which the later wins."""
    if env.get("PIP_CONFIG_FILE") == "/dev/null":
        files: list[Path] = []
    else:
        files = [
            Path("/etc/pip.conf"),
            home / ".pip" / "pip.conf",
            Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf",
            Path(sys.prefix) / "pip.conf",
            *([Path(env["PIP_CONFIG_FILE"])] if env.get("PIP_CONFIG_FILE") else []),
        ]
    found = _of_files(files)
    for name, value in env.items():
        if name.startswith("PIP_") and value:
            found[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return found


def _of_files(paths: Iterable[Path]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip itself would complain; a build may not need it
        for section in ("global", "install"):
            if parser.has_section(section):
                found.update(parser.items(section))
    return found
