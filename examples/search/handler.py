"""Search by meaning: a small function without a model, which calls `embed` for the vectors."""

from fleetstart.runtime import Scale, call, function

PASSAGES = [
    "A cold start is the time from a call without a worker until its first answer.",
    "Weights lie in shared memory, and all workers of a node map them.",
    "Several servers can start one model as a pipeline, each with a part of its layers.",
    "Every call becomes one row of the ledger, and the bill is the sum of the rows.",
    "An API key can be limited to functions or to a project, and be revoked.",
]


@function(calls=["embed"], memory="64MiB", concurrency=8, scale=Scale(max=2))
class Search:
    def __init__(self):
        self.vectors = []

    def __call__(self, text: str, top: int = 1) -> list[str]:
        """`{"text": "How long does the first answer take?"}` → the passages that are nearest to it."""
        if not self.vectors:  # in the first call: there is none in load(), so nothing that could be billed
            self.vectors = call("embed", texts=PASSAGES)["embeddings"]
        [asked] = call("embed", texts=[text])["embeddings"]
        likeness = [sum(a * b for a, b in zip(asked, vector, strict=True)) for vector in self.vectors]
        best = sorted(range(len(PASSAGES)), key=likeness.__getitem__, reverse=True)
        return [PASSAGES[index] for index in best[:top]]
