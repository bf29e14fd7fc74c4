from fastapi import FastAPI

from fleetstart.runtime import function

app = FastAPI()


@app.get("/items/{number}")
def item(number: int, loud: bool = False) -> dict[str, str]:
    return {"item": f"item {number}" + ("!" if loud else "")}


web = function(requirements=["fastapi"], memory="256MiB")(app)
