"""Client of the container engine that builds and holds images, over the Docker API."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import IO

import docker
from docker.errors import APIError, DockerException, ImageNotFound, StreamParseError
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from .definitions import PREFIX

NAME_LABEL = "fleetstart.image"
"""Label of each image that was built here: its name in `definitions`."""
TIMEOUT_S = 600
"""Limit of one request: the engine writes a gigabyte of layers before it answers."""
LOG_LINES = 12


class ImageEngineError(OSError):
    """The engine refused a request, or does not answer."""


class BuildFailed(OSError):
    """A step of a build failed. `step` is the step as the engine names it, `log` the end of what it printed."""

    def __init__(self, image: str, reason: str, *, step: str, log: list[str]) -> None:
        super().__init__(f"building {image} failed at {step or 'its start'}: {reason}")
        self.step, self.log = step, log


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image that the engine has."""

    id: str
    tags: tuple[str, ...]
    name: str
    size_bytes: int
    created_unix_s: float
    labels: Mapping[str, str]


class ImageEngine:
    """One engine, by the address of its API. Errors of all calls: ImageEngineError."""

    def __init__(self, address: str) -> None:
        self.address = address
        with self._reported("be reached"):
            self._api = docker.APIClient(base_url=address, version="auto", timeout=TIMEOUT_S)

    def build(
        self,
        tag: str,
        context: IO[bytes],
        *,
        arguments: Mapping[str, str],
        labels: Mapping[str, str],
        progress: Callable[[str], None],
    ) -> None:
        """Builds an image, without a network. `progress` gets each line of the log. Errors: BuildFailed."""
        lines: list[str] = []
        step = ""
        with self._reported(f"build {tag}"):
            for event in self._api.build(
                fileobj=context,
                custom_context=True,
                tag=tag,
                buildargs=dict(arguments),
                labels=dict(labels),
                network_mode="none",
                rm=True,
                forcerm=True,
                decode=True,
            ):
                if "error" in event:
                    raise BuildFailed(tag, str(event["error"]).strip(), step=step, log=lines[-LOG_LINES:])
                for line in str(event.get("stream") or event.get("status") or "").splitlines():
                    if line.strip():
                        lines.append(line.rstrip())
                        step = line.strip() if line.startswith("Step ") else step
                        progress(line.rstrip())

    def import_root(self, tag: str, data: IO[bytes]) -> None:
        """Imports a tar of a root as an image."""
        repository, _, version = tag.partition(":")
        with self._reported(f"import {tag}"):
            self._api.import_image_from_file(data.name, repository=repository, tag=version)

    def find(self, tag: str) -> BuiltImage | None:
        """An image by its name; None if the engine lacks it."""
        with self._reported(f"look for {tag}"):
            try:
                found = self._api.inspect_image(tag)
            except ImageNotFound:
                return None
        labels = (found.get("Config") or {}).get("Labels") or {}
        # An engine leaves the time out where an image has none.
        made = str(found.get("Created") or "1970-01-01T00:00:00")
        created = datetime.fromisoformat(made[:19] + "+00:00").timestamp()
        return BuiltImage(
            found["Id"], tuple(found["RepoTags"] or ()), labels.get(NAME_LABEL, ""), found["Size"], created, labels
        )

    def images(self) -> list[BuiltImage]:
        """Images that were built by `fs image build` and have a name, the newest first."""
        with self._reported("list its images"):
            listed = self._api.images(filters={"label": NAME_LABEL})
        found = [
            BuiltImage(one["Id"], tuple(tags), one["Labels"][NAME_LABEL], one["Size"], one["Created"], one["Labels"])
            for one in listed
            if (tags := [tag for tag in one["RepoTags"] or () if _is_named(tag, one["Labels"][NAME_LABEL])])
        ]
        return sorted(found, key=lambda image: (-image.created_unix_s, image.name))

    def close(self) -> None:
        self._api.close()

    @contextlib.contextmanager
    def _reported(self, action: str) -> Iterator[None]:
        try:
            yield
        except (APIError, DockerException, RequestException, HTTPError, StreamParseError) as error:
            # The last two: the client lets through what breaks in the middle of a build's log.
            said = getattr(error, "explanation", None) or error
            raise ImageEngineError(f"the container engine at {self.address} could not {action}: {said}") from error


def _is_named(tag: str, name: str) -> bool:
    """Checks whether a tag is that of the image itself: one that is built on it has its labels, too."""
    return tag.rpartition(":")[0].rpartition("/")[2] == f"{PREFIX}{name}"
