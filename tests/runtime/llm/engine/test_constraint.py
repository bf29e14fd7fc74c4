"""Grammars over a model's tokens: what they allow, and what they do to a batch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.llm.engine.constraint import Constraint, ConstraintCompiler, masked
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplerState, SamplingParams, sample
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.runtime.llm.models import Checkpoint, byte_tokenizer, engine, native, run, text_of

VOCAB, END = 258, 1
TOKENIZER = Tokenizer(byte_tokenizer())


def compiled(schema: object, *, vocab: int = VOCAB) -> Constraint:
    compiler = ConstraintCompiler(byte_tokenizer, vocab, frozenset({END}))
    return compiler.compile(json.dumps({"grammars": [{"json_schema": schema}]}))


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_it_allows_what_may_follow_and_then_the_end_alone() -> None:
    constraint = compiled({"enum": ["ab", "ac"]})
    for text, wanted in (("", '"'), ('"', "a"), ('"a', "bc"), ('"ab', '"')):
        allowed = constraint.matcher(tokens(text)).allowed().nonzero()[0].tolist()
        assert sorted(allowed) == sorted(tokens(wanted))
    assert constraint.matcher(tokens('"ab"')).allowed().nonzero()[0].tolist() == [END]


@pytest.mark.parametrize("vocab", [200, VOCAB, 300])
def test_the_logits_may_be_wider_or_narrower_than_the_tokenizer(vocab: int) -> None:
    constraint = compiled({"enum": ["ab"]}, vocab=vocab)
    assert constraint.matcher().allowed().shape == (vocab,)
    assert sum(constraint.matcher().allowed()) == 1


def test_tokens_that_it_does_not_allow_are_refused() -> None:
    with pytest.raises(InvalidInput, match="does not allow"):
        compiled({"type": "integer"}).matcher(tokens("x"))


def test_a_model_without_an_end_token_has_no_grammars() -> None:
    with pytest.raises(InvalidInput, match="no end token"):
        ConstraintCompiler(byte_tokenizer, VOCAB, frozenset()).compile("{}")
    with pytest.raises(InvalidInput, match="tokenizer"):
        ConstraintCompiler(lambda: b"{}", VOCAB, frozenset({END})).compile("{}")


def test_a_mask_is_for_its_own_row_alone() -> None:
    logits = torch.zeros(3, VOCAB)
    state = compiled({"enum": ["a"]}).matcher()
    found = masked(logits.clone(), [1], [state])
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert (found[1] == 0).nonzero().flatten().tolist() == tokens('"')
    states = [SamplerState(SamplingParams(temperature=0)), SamplerState(SamplingParams(seed=1), matcher=state)]
    assert sample(logits[:2], states)[1] == tokens('"')[0]
    assert torch.equal(logits, torch.zeros(3, VOCAB))


def test_a_grammar_that_fails_ends_its_own_request_alone(tiny_model: Checkpoint) -> None:
    subject: Engine = engine(tiny_model, native(tiny_model))
    constraint = compiled({"type": "array", "items": {"type": "integer"}})
    plain = Request(tokens=[70, 71], max_new_tokens=12, sampling=SamplingParams(temperature=0), ignore_eos=True)
    (wanted,) = run(engine(tiny_model, native(tiny_model)), [plain])
    id = subject.add(replace(plain, constraint=constraint))
    other = subject.add(plain)
    subject.step()
    matcher = subject._active[id].sampler.matcher
    assert matcher is not None
    matcher.consume(tokens("x")[0])  # as after a limit of the grammar was passed
    deltas = [delta for _ in range(12) for delta in subject.step()]
    (failed,) = [delta for delta in deltas if delta.id == id]
    assert isinstance(failed.error, InvalidInput)
    assert text_of(wanted).endswith("".join(delta.text for delta in deltas if delta.id == other))
    assert subject.idle


def test_requests_that_a_target_could_not_go_on_with_stay(tiny_model: Checkpoint) -> None:
    subject = engine(tiny_model, native(tiny_model))
    plain = Request(tokens=[70], max_new_tokens=20, sampling=SamplingParams(temperature=0), ignore_eos=True)
    id = subject.add(plain)
    subject.add(replace(plain, logprobs=0))
    subject.add(replace(plain, constraint=compiled({"type": "array"})))
    subject.step()
    assert [candidate for candidate, _ in subject.migration_candidates()] == [id]
