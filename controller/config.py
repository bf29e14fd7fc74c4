"""Configuration of the controller: read once from FS_* variables in __main__, passed down by constructor."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleetstart.runtime.contract.process.environment import (
    ConfigError,
    read_flag,
    read_int,
    read_links,
    read_log_format,
    read_networks,
    read_store,
)
from fleetstart.runtime.contract.process.log_format import LogFormat
from fleetstart.runtime.contract.process.redis_url import with_ca
from fleetstart.runtime.contract.sizes import MIB

OTLP_PATH = "/v1/traces"
DRAIN_S = 10
LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    home: Path
    redis_url: str
    store: str
    """A folder, or s3://bucket/prefix."""
    url: str
    """Public base URL, as shown to users."""
    host: str = "127.0.0.1"
    port: int = 7433
    listen_fd: int | None = None
    """An inherited listening socket: its owner keeps it across a restart, so that no connection is refused."""
    public_fd: int | None = None
    """Another inherited listening socket, for other machines (`fs up --listen`)."""
    tls_cert: str = ""
    tls_key: str = ""
    """PEM files of the certificate and its key, for all listening sockets but `listen_fd`; empty: no TLS."""
    max_body_bytes: int = 64 * MIB
    parent_death: bool = False
    segment_rows: int = 10_000
    """Rows in a segment of the ledger: with fewer, Redis holds less, and reading takes longer."""
    log_format: LogFormat = "text"
    otlp_endpoint: str = ""
    """URL of the collector of spans; empty: none."""
    webhook_allow: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    """Networks that webhooks may reach although they are not public."""
    trusted_proxies: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = LOOPBACK
    """Where reverse proxies call from: what they say of client and protocol (X-Forwarded-For, -Proto) is believed."""
    drain_s: float = DRAIN_S
    """Drain timeout: time for calls in progress after SIGTERM."""
    open: bool = False
    """True if this machine may do everything without a key, as long as there is none; if not, a first key is made."""
    first_key: bool = False
    """Make the first key also where other machines reach the controller (FS_FIRST_KEY); until then, all requests are
    rejected."""
    own_node: str = ""
    """Name of the node of the same home, if other machines reach it: this controller vouches for it."""
    plain_links: bool = False
    """Reach workers on other machines without TLS (FS_LINKS=plain)."""
    master_key: str = ""
    """Master key that encrypts secrets; empty: a key file in the home (`auth.secret_encryption`)."""


def read_drain_s(env: Mapping[str, str]) -> float:
    """Time for calls in progress after SIGTERM. Errors: ConfigError."""
    return float(read_int(env, "FS_DRAIN_S", DRAIN_S, most=3600))


def read_config(env: Mapping[str, str]) -> Config:
    """Reads the configuration from environment variables. Errors: ConfigError, naming the variable."""
    home = Path(env.get("FS_HOME") or "~/.fleetstart").expanduser().absolute()
    default = Config(home=home, redis_url=f"unix://{home}/redis.sock", store=str(home / "store"), url="")
    host = env.get("FS_HOST") or default.host
    port = read_int(env, "FS_PORT", default.port, most=65535)
    listen_fd = read_int(env, "FS_LISTEN_FD", 0, most=1 << 20) if env.get("FS_LISTEN_FD") else None
    tls_cert, tls_key = env.get("FS_TLS_CERT") or "", env.get("FS_TLS_KEY") or ""
    if bool(tls_cert) != bool(tls_key):
        raise ConfigError("FS_TLS_CERT and FS_TLS_KEY belong together: set both, or neither")
    scheme = "https" if tls_cert and listen_fd is None else "http"
    return Config(
        home=home,
        redis_url=with_ca(env.get("FS_REDIS_URL") or default.redis_url, env.get("FS_REDIS_CA") or ""),
        store=read_store(env, "FS_STORE", default.store),
        url=(env.get("FS_URL") or f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}").rstrip("/"),
        host=host,
        port=port,
        listen_fd=listen_fd,
        public_fd=read_int(env, "FS_PUBLIC_FD", 0, most=1 << 20) if env.get("FS_PUBLIC_FD") else None,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_body_bytes=read_int(env, "FS_MAX_BODY", default.max_body_bytes, least=1, most=1 << 40),
        parent_death=read_flag(env, "FS_PARENT_DEATH"),
        segment_rows=read_int(env, "FS_SEGMENT_ROWS", default.segment_rows, least=10, most=100_000),
        log_format=read_log_format(env),
        otlp_endpoint=_otlp_endpoint(env),
        webhook_allow=read_networks(env, "FS_WEBHOOK_ALLOW"),
        trusted_proxies=read_networks(env, "FS_TRUSTED_PROXIES") if "FS_TRUSTED_PROXIES" in env else LOOPBACK,
        drain_s=read_drain_s(env),
        open=read_flag(env, "FS_OPEN"),
        first_key=read_flag(env, "FS_FIRST_KEY"),
        own_node=env.get("FS_OWN_NODE") or "",
        plain_links=read_links(env) == "plain",
        master_key=env.get("FS_MASTER_KEY") or "",
    )


def _otlp_endpoint(env: Mapping[str, str]) -> str:
    """The URL for spans, from FS_OTLP_ENDPOINT or OpenTelemetry's own variables, of which one is the URL, the other its
    base."""
    url = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    base = env.get("FS_OTLP_ENDPOINT") or ("" if url else env.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""))
    if base:
        url = base if base.rstrip("/").endswith(OTLP_PATH) else base.rstrip("/") + OTLP_PATH
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"the OTLP endpoint {url[:80]!r} must begin with http:// or https://")
    return url
