"""Checks of single settings of a function: origins, regions, secrets, tags, hosts, images. Pure."""

from __future__ import annotations

import re

from ..errors import InvalidSpec

_TAG = re.compile(r"[A-Za-z0-9._/-]{1,63}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._~\[\]:-]{1,253}")
ORIGINS_MAX = 100
_IMAGE = re.compile(
    r"([A-Za-z0-9.-]+(:[0-9]{1,5})?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
"""Name of an image, as engines write it: host, path, tag, digest."""
IMAGE_MAX = 255
_REGION = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
REGIONS_MAX = 16
SECRET_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
SECRETS_MAX = 32
TAGS_MAX = 8
"""Maximum number of tags; each row of the ledger carries them."""


def check_image_name(function: str, image: str) -> None:
    """Checks the name of a function's image. Errors: InvalidSpec."""
    if len(image) > IMAGE_MAX or not _IMAGE.fullmatch(image):
        raise InvalidSpec(
            f"function {function}: {image[:80]!r} is no name of an image",
            hint='write it as your engine lists it: "app:1.2" or "registry.example.com/team/app:1.2"',
        )


def check_origins(origins: list[str]) -> None:
    """Checks the origins of `cors`. Errors: InvalidSpec."""
    if len(origins) > ORIGINS_MAX:
        raise InvalidSpec(f"cors has {ORIGINS_MAX} origins at most, got {len(origins)}")
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise InvalidSpec(
                f"cors: {origin[:100]!r} is no origin",
                hint='write scheme and host, no path: cors=["https://app.example.com"]; or cors="*" for all',
            )


def check_regions(names: list[str]) -> None:
    """Checks the regions of a function. Errors: InvalidSpec."""
    if len(names) > REGIONS_MAX:
        raise InvalidSpec(f"region has {REGIONS_MAX} names at most, got {len(names)}")
    for name in names:
        check_region(name)


def check_region(name: str) -> None:
    """Checks the name of a region. Errors: InvalidSpec."""
    if not _REGION.fullmatch(name):
        raise InvalidSpec(
            f"region {name[:80]!r} is not allowed", hint='use 1 to 63 of a-z, 0-9 and -, as in "eu" or "us-east-1"'
        )


def check_network(network: bool | list[str]) -> None:
    """Checks the hosts that `network` lists. Errors: InvalidSpec."""
    if isinstance(network, list):
        from .egress_policy import parse_rules

        parse_rules(network)


def check_secrets(names: list[str], env: dict[str, str]) -> None:
    """Checks names of secrets, which become environment variables beside those of `env`. Errors: InvalidSpec."""
    if len(names) > SECRETS_MAX:
        raise InvalidSpec(f"a function has {SECRETS_MAX} secrets at most, got {len(names)}")
    for name in names:
        if not SECRET_NAME.fullmatch(name):
            raise InvalidSpec(
                f"secret {name[:80]!r} cannot be an environment variable",
                hint="its name is 1 to 64 of A-Z, a-z, 0-9 and _, no digit first",
            )
        if name in env or names.count(name) > 1:
            raise InvalidSpec(f"secret {name} is set twice", hint="leave it out of env" if name in env else "")


def check_tags(tags: dict[str, str]) -> None:
    """Checks the tags of a function. Errors: InvalidSpec."""
    if len(tags) > TAGS_MAX:
        raise InvalidSpec(f"a function has {TAGS_MAX} tags at most, got {len(tags)}")
    for name, value in tags.items():
        if not _TAG.fullmatch(name) or not _TAG.fullmatch(value):
            raise InvalidSpec(
                f"tag {name[:80]!r}: {value[:80]!r} is not allowed",
                hint="names and values are 1 to 63 of a-z, A-Z, 0-9, . _ / and -",
            )
