"""Entry point of `python -m fleetstart.controller.cli`, which is `fs`."""

from . import main

main()
