"""Container images of fleetstart: build files, what goes into them, and a compose file for all parts.

`fs image build` makes them from the packages of the environment that it runs in, so an image has what was tested here,
version by version, and its build downloads nothing but the base image. `definitions` names the images, `distributions`
finds their packages, `context` packs them, `engine` builds them.
"""

from __future__ import annotations
