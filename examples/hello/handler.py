"""The smallest function: JSON in, JSON out."""

from fleetstart.runtime import Scale, function


@function(memory="128MiB", concurrency=4, scale=Scale(max=4, keep_alive_s=30))
def hello(name: str = "world") -> dict[str, str]:
    print(f"saying hello to {name}")
    return {"message": f"Hello, {name}!"}
