"""The two kinds of trees of files that a node fetches and keeps: layers of packages, and versions of volumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import LayerId
from fleetstart.runtime.contract.object_keys import layer_key, volume_key


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeKind:
    """Differences between the kinds: where their objects are, and the words for them."""

    name: str
    key: Callable[[LayerId, str], str]
    """The key of the manifest, or of a part."""
    send_again: str
    """Hint where the store lacks something."""
    setting: str
    """The node's setting of their room on its disk."""
    smaller: str
    """What else helps where there is no room."""


LAYER = TreeKind(
    name="layer",
    key=layer_key,
    send_again="deploy the function again: it sends what the store lacks",
    setting="FS_LAYER_CACHE",
    smaller="need fewer packages",
)
VOLUME = TreeKind(
    name="volume",
    key=volume_key,
    send_again="put the folder again: `fs volume put` sends what the store lacks",
    setting="FS_VOLUME_CACHE",
    smaller="put less into the volume",
)
