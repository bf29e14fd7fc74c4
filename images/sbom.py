"""Software bill of materials of an image: its distributions in CycloneDX 1.6, as JSON."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .definitions import ImageDefinition

LICENSE_MAX = 100
"""Characters of a licence's name; some distributions have the whole text in its place."""


def sbom(image: ImageDefinition, has: Mapping[str, metadata.Distribution], made_unix_s: int) -> str:
    """The bill of an image. The same distributions give the same text: its number is made of them."""
    components = {name: _component(name, distribution) for name, distribution in has.items()}
    whole = Component(name=image.repository, type=ComponentType.CONTAINER, bom_ref=image.repository)
    listed = " ".join(f"{name}=={distribution.version}" for name, distribution in has.items())
    bom = Bom(
        components=components.values(),
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{image.repository} {listed}"),
        metadata=BomMetaData(component=whole, timestamp=datetime.fromtimestamp(made_unix_s, UTC)),
        dependencies=[
            Dependency(whole.bom_ref, [Dependency(one.bom_ref) for one in components.values()]),
            *(
                Dependency(components[name].bom_ref, [Dependency(components[one].bom_ref) for one in needed])
                for name, needed in _needed(has).items()
            ),
        ],
    )
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    return text


def _component(name: str, distribution: metadata.Distribution) -> Component:
    said = distribution.metadata.json
    names = [str(said.get("license_expression") or said.get("license") or "").strip()]
    if not names[0] or len(names[0]) > LICENSE_MAX:
        # Older distributions name it by Trove classifiers: "License :: OSI Approved :: MIT License".
        kinds = [text.split(" :: ") for text in distribution.metadata.get_all("Classifier") or ()]
        names = [kind[-1] for kind in kinds if kind[0] == "License" and kind[1:] != ["OSI Approved"]]
    licences = [LicenseFactory().make_from_string(name) for name in dict.fromkeys(names)]
    return Component(
        name=name,
        version=distribution.version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}=={distribution.version}",
        purl=PackageURL("pypi", name=name, version=distribution.version),
        licenses=licences,
    )


def _needed(has: Mapping[str, metadata.Distribution]) -> dict[str, list[str]]:
    """What each distribution requires of the others, whatever the extra that it is for."""
    found = {}
    for name, distribution in has.items():
        names = {str(canonicalize_name(Requirement(text).name)) for text in distribution.requires or ()}
        found[name] = sorted(one for one in names if one in has and one != name)
    return found
