"""Reads the function's answer from standard input, and compares it with plain transformers from the same folder."""

import json
import sys

from transformers import pipeline

(answer,) = json.load(sys.stdin)
plain = pipeline("text-classification", model="mood/weights", top_k=None, device="cpu")(["a good film."])[0]
served = {row["label"]: row["score"] for row in answer}
worst = max(abs(row["score"] - served.pop(row["label"])) for row in plain)
assert not served, served
assert worst < 1e-6, worst
print(f"{worst:.1e}")
