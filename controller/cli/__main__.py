"""`python -m fleetstart.controller.cli` is `fs`."""

from fleetstart.controller.cli.root import main

main()
