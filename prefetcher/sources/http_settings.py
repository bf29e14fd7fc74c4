"""Proxies and certificates of the connections to an object store, read from the environment once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Proxies and certificates of the connections to an object store."""

    proxies: Mapping[str, str] = field(default_factory=dict)
    """URL of the proxy by scheme; `no` lists the hosts that are reached directly."""
    ca_bundle: str | None = None
    """File of trusted certificates; None for the system's."""


def http_settings(env: Mapping[str, str]) -> HttpSettings:
    """Reads http_proxy, https_proxy and no_proxy, lower case first as curl does; AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE."""
    proxies = {
        name.lower().removesuffix("_proxy"): value
        for name, value in sorted(env.items())  # lower case comes last
        if name.lower().endswith("_proxy") and (value or name.islower())
    }
    return HttpSettings(
        proxies={scheme: value for scheme, value in proxies.items() if value},
        ca_bundle=env.get("AWS_CA_BUNDLE") or env.get("REQUESTS_CA_BUNDLE") or None,
    )
