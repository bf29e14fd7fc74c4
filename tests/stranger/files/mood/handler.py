from fleetstart.runtime import Transformers

mood = Transformers(weights="./weights", task="text-classification")
