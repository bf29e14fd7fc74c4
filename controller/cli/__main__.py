"""`python -m fleetstart.controller.cli` is `fs`."""

from .root import main

main()
