from fleetstart.runtime import LLM

chat = LLM(weights="./weights", memory="2GiB")
