"""A chat model behind OpenAI's API. The platform's own engine runs it; `make models` brings the weights."""

from fleetstart.runtime import LLM, Scale

chat = LLM(weights="./weights", dtype="fp32", max_batch=8, memory="2GiB", scale=Scale(max=2, keep_alive_s=60))
