"""Handler API, exported by `fleetstart.runtime`."""
