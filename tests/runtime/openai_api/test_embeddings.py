"""`/v1/embeddings` through the `openai` client, over small models of transformers in workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.worker_headers import REQUEST_HEADER, TOKEN_HEADER
from fleetstart.runtime.openai_api.call_reader import CallReader
from fleetstart.runtime.openai_api.embeddings import EmbeddingCall
from fleetstart.runtime.openai_api.invalid_parameter import InvalidParameter
from tests.runner.late import late
from tests.runtime.pretrained.models import save_text_model
from tests.runtime.saved_models import segment_of_folder
from tests.runtime.workers import TOKEN, Functions, Worker

openai = late("openai")

TEXTS = ["a good film .", "the cat sat on the mat ."]
SOURCE = """
from fleetstart.runtime import Transformers
f = Transformers(weights="./weights", task="{task}")
"""
READER = CallReader(EmbeddingCall, "embeddings")


def worker_of(folder: Path, functions: Functions, task: str) -> Worker:
    segment = segment_of_folder(folder)
    worker = functions.assigned(
        SOURCE.format(task=task), profile="torch", weights=CheckpointId("0" * 64), segment=segment.fds
    )
    worker.ready()
    return worker


def test_the_client_gets_the_vectors_of_the_function(tmp_path: Path, torch_functions: Functions) -> None:
    worker = worker_of(save_text_model(tmp_path / "model", "BertModel"), torch_functions, "embedding")
    vectors = worker.post({"texts": TEXTS}).json()["embeddings"]
    headers = {TOKEN_HEADER: TOKEN, REQUEST_HEADER: "inv-test"}
    url = f"{worker.url}v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, default_headers=headers) as client:
        answer = client.embeddings.create(model="f", input=TEXTS)  # the client asks for base64
        assert [one.embedding for one in answer.data] == [pytest.approx(vector, abs=1e-6) for vector in vectors]
        assert [one.index for one in answer.data] == [0, 1]
        assert answer.usage.total_tokens == answer.usage.prompt_tokens == 6 + 9
        plain = client.embeddings.create(model="f", input=TEXTS[0], encoding_format="float", dimensions=32, user="me")
        assert plain.data[0].embedding == pytest.approx(vectors[0], abs=1e-6)
        assert [model.id for model in client.models.list()] == ["f"]
        assert client.models.retrieve("f").id == "f"
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="text-embedding-3-small", input="a")
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="f", input="a", dimensions=7)
        assert caught.value.param == "dimensions"
    assert worker.get("v1/embeddings").status_code == 400


def test_functions_of_other_tasks_have_no_such_route(tmp_path: Path, torch_functions: Functions) -> None:
    folder = save_text_model(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    worker = worker_of(folder, torch_functions, "text-classification")
    answer = worker.post({"input": "a"}, path="v1/embeddings")
    assert answer.status_code == 400
    assert "input" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"input": []}', "input"),
        (b'{"input": ""}', "input"),
        (b'{"input": ["a", ""]}', "input"),
        (b'{"input": [1, 2]}', "input"),
        (b'{"input": [[1, 2]]}', "input"),
        (b'{"input": ["a"' + b', "a"' * 2048 + b"]}", "input"),
        (b'{"input": null}', "input"),
        (b"{}", "input"),
        (b'{"input": "a", "encoding_format": "int8"}', "encoding_format"),
        (b'{"input": "a", "frobnicate": 1}', "frobnicate"),
    ],
)
def test_wrong_fields_are_refused_by_name(body: bytes, param: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        READER.read(body)
    assert caught.value.param == param
