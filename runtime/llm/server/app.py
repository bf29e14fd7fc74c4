"""ASGI app of a language model: routes, requests, responses, streams, disconnecting clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import msgspec
import torch

from ...contract.errors import FleetError, InvalidInput, NotFound, TooLarge, Unavailable
from ...contract.function.spec import LLMSettings
from ...contract.node.speed import Speed
from ...contract.worker_headers import CONTINUE_HEADER, DEADLINE_HEADER
from ...worker_io.asgi import JSON, ClientDisconnected, Receive, ResponseAborted, Scope, Send, respond
from ..engine.constraint import Constraint
from ..engine.generation import Request
from ..model.loader import LoadedModel, load_model
from ..model.weights import ModelWeights
from ..text.token_texts import TokenTexts
from . import openai_responses
from .answer_writers import AnswerWriter, ChatWriter, Choice, TextWriter
from .call_reader import CallReader
from .engine_service import DeltaStream, EngineService
from .invalid_parameter import InvalidParameter, ModelNotFound
from .output_format import json_grammar
from .requests import ChatCall, ChatMessage, CompletionCall, PlainCall, SamplingFields, StreamableCall
from .stream_resume import (
    ResumedStream,
    ResumeMarkWriter,
    apply_settings,
    choose_settings,
    read_resume_marks,
    split_body,
)
from .tools.formats import ToolFormat, calls_grammar, format_of, shown_tokens
from .tools.prompt import render_chat
from .tools.reader import ToolReader
from .tools.requests import ToolUse

BODY_MAX_BYTES = 8 * 1024 * 1024
"""Far more text than any context holds."""
LONG_TEXT = 16_384
"""Length in characters above which a text is tokenised in a thread, since it takes milliseconds."""
Result = TypeVar("Result")
STREAMING = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
MARKED = (CONTINUE_HEADER.encode(), b"1")


def create_app(weights: ModelWeights, settings: LLMSettings, *, name: str, threads: int) -> LLMApp:
    """Loads the model and builds its app. Errors: as of `load_model`."""
    return LLMApp(load_model(weights, settings, threads=threads), name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineCall:
    """One call for the engine: a request for each choice, and the response's settings."""

    requests: list[Request]
    answer: AnswerWriter
    usage: openai_responses.TokenUsage
    stream: bool = False
    marker: ResumeMarkWriter | None = None
    """Set if another worker can resume the stream."""


class LLMApp:
    """ASGI app of one model, without lifespan."""

    def __init__(self, model: LoadedModel, *, name: str) -> None:
        self._model = model
        self._name = name
        self._created_s = int(time.time())
        # Sampling is a few tensor operations on one row: more threads would only compete with the decoder's.
        on_cpu = not torch.cuda.is_available()
        self.service = EngineService(model.engine, prepare=(lambda: torch.set_num_threads(1)) if on_cpu else None)
        self._token_texts = TokenTexts(model.tokenizer)
        self._chat_reader = CallReader(ChatCall, "chat")
        self._completion_reader = CallReader(CompletionCall, "completions")
        self._plain_reader = CallReader(PlainCall, "plain")
        self._routes: dict[str, tuple[str, Callable[[Scope, Receive, Send], Awaitable[None]]]] = {
            "/": ("POST", self._plain),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
            "/v1/models": ("GET", self._models),
        }

    def speed(self) -> Speed | None:
        """Mean latencies; None until one request has ended. From any thread."""
        return self.service.speed()

    def close(self) -> None:
        """Ends running requests with 503, and the engine's thread; returns when that has ended."""
        self.service.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: openai_responses.Json) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._route(scope, receive, sending)  # type: ignore[arg-type]
        except ClientDisconnected:
            return
        except FleetError as error:
            if begun:
                await _end_stream(send, error)
            else:
                await respond(send, error.status, msgspec.json.encode(openai_responses.error_body(error)), JSON)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") or "/"
        method, handle = self._routes.get(path, ("", None))
        if handle is None:
            if path.startswith("/v1/models/") and scope["method"] == "GET":
                return await self._one_model(path.removeprefix("/v1/models/"), send)
            raise NotFound(f"no route {scope['method']} {path}", hint="there are " + ", ".join(self._routes))
        if scope["method"] != method:
            body = openai_responses.error_body(InvalidInput(f"{path} takes {method}, not {scope['method']}"))
            return await respond(send, 405, msgspec.json.encode(body), JSON, [(b"allow", method.encode())])
        await handle(scope, receive, send)

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 200, msgspec.json.encode(openai_responses.models(self._name, self._created_s)), JSON)

    async def _one_model(self, name: str, send: Send) -> None:
        self._check_model(name)
        await respond(send, 200, msgspec.json.encode(openai_responses.model(self._name, self._created_s)), JSON)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, carried = split_body(scope["headers"], await _read_body(receive))
        call = self._chat_reader.read(body)
        self._check_model(call.model)
        use = call.tool_use()
        tokens = await self._encode_chat(call.messages, use)
        constraint = await self._constraint(call.answer_schema(), use)
        tools = None if use is None or self._tool_format is None else ToolReader(self._tool_format, use.parallel)
        answer = partial(ChatWriter, tools=tools)
        shown = {} if use is None else self._shown_tokens
        work = await self._work(answer, call, [tokens], scope, carried, constraint=constraint, shown_tokens=shown)
        await self._answer(work, receive, send)

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, carried = split_body(scope["headers"], await _read_body(receive))
        call = self._completion_reader.read(body)
        self._check_model(call.model)
        prompts = [await self._encode(prompt) for prompt in call.prompts()]
        await self._answer(await self._work(TextWriter, call, prompts, scope, carried), receive, send)

    async def _plain(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._plain_reader.read(await _read_body(receive))
        self._check_model(call.model)
        tokens = await (
            self._encode(call.prompt) if call.prompt is not None else self._encode_chat(call.messages or [])
        )
        request = self._request(call, tokens, _deadline_ns(scope))
        usage = openai_responses.TokenUsage(prompt_tokens=len(tokens))
        [choice] = await _while_connected(receive, self._collect(self.service.open([request]), usage))
        body = {"text": choice.text, "finish_reason": choice.finish, "usage": usage.json()}
        await respond(send, 200, msgspec.json.encode(body), JSON)

    def _check_model(self, model: str | None) -> None:
        if model and model.partition("@")[0] != self._name:
            raise ModelNotFound(f"the model {model!r} is not served here", hint=f"ask for {self._name!r}")

    async def _encode_chat(self, messages: list[ChatMessage], use: ToolUse | None = None) -> list[int]:
        template = self._model.chat_template
        if template is None:
            raise InvalidInput("this model has no chat template", hint="use /v1/completions")
        if use is not None and self._tool_format is None:
            raise InvalidParameter("tools: the format of the tools in this model's chat template is not known", "tools")
        text = render_chat(template, [message.plain() for message in messages], use)
        return await self._tokens(text, add_special_tokens=False)

    @cached_property
    def _tool_format(self) -> ToolFormat | None:
        template = self._model.chat_template
        return None if template is None else format_of(template)

    @cached_property
    def _shown_tokens(self) -> dict[int, str]:
        return {} if self._tool_format is None else shown_tokens(self._tool_format, self._model.tokenizer)

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._tokens(prompt, add_special_tokens=True)
        vocab_size = self._model.vocab_size
        if any(not 0 <= token < vocab_size for token in prompt):
            raise InvalidInput(f"prompt: a token is not of 0 to {vocab_size - 1}")
        return prompt

    async def _tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encode = self._model.tokenizer.encode
        if len(text) < LONG_TEXT:
            return encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)

    async def _work(
        self,
        writer: Callable[..., AnswerWriter],
        call: StreamableCall,
        prompts: list[list[int]],
        scope: Scope,
        carried: bytes | None,
        **more: Any,
    ) -> _EngineCall:
        """`more`: further fields of the requests."""
        deadline_ns = _deadline_ns(scope)
        requests = [
            _choice(replace(self._request(call, tokens, deadline_ns), **more), number)
            for tokens in prompts
            for number in range(call.n or 1)
        ]
        texts = self._token_texts if call.wanted_logprobs() is not None else None
        with_usage = call.stream_options is not None and call.stream_options.include_usage
        work = _EngineCall(
            requests=requests,
            answer=writer(self._name, texts=texts, with_usage=with_usage),
            usage=openai_responses.TokenUsage(prompt_tokens=sum(map(len, prompts))),
            stream=bool(call.stream),
        )
        if not work.stream or carried is None:
            return work
        return await self._resume_stream(work, carried) if carried else self._with_marks(work)

    async def _constraint(self, schema: dict[str, Any] | bool | None, use: ToolUse | None) -> Constraint | None:
        """The compiled grammar of an answer, if it has one. Errors: InvalidParameter with the reason."""
        form = self._tool_format
        if use is not None and form is not None and (use.forced or schema is not None):
            answer = None if use.forced else schema
            grammar, param = calls_grammar(use, form, self._shown_tokens, answer), "tools"
        elif schema is not None:
            grammar, param = json_grammar(schema), "response_format"
        else:
            return None
        try:
            return await asyncio.to_thread(self._model.constraints.compile, grammar)
        except InvalidInput as error:
            raise InvalidParameter(f"{param}: {error.message}", param) from error

    @staticmethod
    def _with_marks(work: _EngineCall) -> _EngineCall:
        first = choose_settings(work.answer.id, work.answer.created_s, work.requests)
        return replace(work, requests=apply_settings(work.requests, first), marker=ResumeMarkWriter(first))

    async def _resume_stream(self, work: _EngineCall, carried: bytes) -> _EngineCall:
        """Resumes a stream that another worker started."""
        before = read_resume_marks(carried, choices=len(work.requests), vocab_size=self._model.vocab_size)
        work.answer.resume(before.chosen.id, before.chosen.created_s)
        work.usage.completion_tokens = sum(map(len, before.tokens))
        requests = await asyncio.to_thread(self._resumed, work, before)
        return replace(work, requests=requests, marker=ResumeMarkWriter(None))

    def _resumed(self, work: _EngineCall, before: ResumedStream) -> list[Request]:
        """The requests after their earlier tokens. Their events were sent: the writer forms them again, for its state.

        Events of several choices alternate as their tokens did, which no writer depends on.
        """
        requests = []
        for index, request in enumerate(apply_settings(work.requests, before.chosen)):
            state = self._model.engine.resume(request, before.tokens[index])
            for delta in state.deltas:
                work.answer.feed(index, delta)
            requests.append(replace(request, resume=state))
        return requests

    def _request(self, call: SamplingFields, tokens: list[int], deadline_ns: int | None) -> Request:
        limit = call.limit()
        room = self._model.engine.scheduler.context_tokens - len(tokens)
        return Request(
            tokens=tokens,
            # Without a limit the response may fill the context; `open` rejects a limit that does not fit.
            max_new_tokens=max(room, 1) if limit is None else limit,
            sampling=call.params(self._model.sampling, self._model.vocab_size),
            stops=call.stops(),
            ignore_eos=call.ignore_eos,
            logprobs=call.wanted_logprobs(),
            deadline_ns=deadline_ns,
        )

    async def _answer(self, work: _EngineCall, receive: Receive, send: Send) -> None:
        if work.stream:
            await _while_connected(receive, self._send_stream(work, send))
            return
        choices = await _while_connected(receive, self._collect(self.service.open(work.requests), work.usage))
        await respond(send, 200, work.answer.whole(choices, work.usage), JSON)

    @staticmethod
    async def _collect(stream: DeltaStream, usage: openai_responses.TokenUsage) -> list[Choice]:
        choices: dict[int, Choice] = {}
        async with stream:
            async for index, delta in stream:
                choices.setdefault(index, Choice()).add(delta)
                usage.completion_tokens += len(delta.tokens)
        return [choices[index] for index in sorted(choices)]

    async def _send_stream(self, work: _EngineCall, send: Send) -> None:
        to_do = [index for index, one in enumerate(work.requests) if one.resume is None or one.resume.finish is None]
        async with self.service.open([work.requests[index] for index in to_do]) as stream:
            begun = False
            try:
                async for chunk in self._chunks(work, stream, to_do):
                    if not begun:  # sent with the first token: an error before it has its own status
                        headers = STREAMING if work.marker is None else [*STREAMING, MARKED]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        begun = True
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Unavailable as error:
                if begun and work.marker is not None:  # the worker shuts down, and another one resumes
                    raise ResponseAborted from error
                raise
            await send({"type": "http.response.body", "body": b""})

    @staticmethod
    async def _chunks(work: _EngineCall, stream: DeltaStream, to_do: list[int]) -> AsyncIterator[bytes]:
        """Events, each with its mark. `to_do`: the choices in the stream."""
        marker = work.marker
        async for number, delta in stream:
            index = to_do[number]
            work.usage.completion_tokens += len(delta.tokens)
            if marker is not None:
                marker.add(index, delta.tokens)
            if events := work.answer.feed(index, delta):
                yield events if marker is None else events + marker.mark()
        yield work.answer.closing(work.usage)


def _choice(request: Request, number: int) -> Request:
    """The request of the nth choice of a prompt, with its own seed if the call has one."""
    if number == 0 or request.sampling.seed is None:
        return request
    return replace(request, sampling=replace(request.sampling, seed=request.sampling.seed + number))


def _deadline_ns(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == DEADLINE_HEADER.encode():
            try:
                return time.monotonic_ns() + round(float(value) * 1e6)
            except (ValueError, OverflowError):
                return None
    return None


async def _read_body(receive: Receive) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body = body + bytes(message.get("body", b""))
        if len(body) > BODY_MAX_BYTES:
            raise TooLarge(f"the body has more than {BODY_MAX_BYTES} bytes")
        if not message.get("more_body", False):
            return body


async def _while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """The work's result; cancels it if the client disconnects. Errors: ClientDisconnected."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end_stream(send: Send, error: FleetError) -> None:
    """Ends a stream with an error event and without [DONE], so that the text is not taken as complete."""
    await send(
        {
            "type": "http.response.body",
            "body": openai_responses.event(openai_responses.error_body(error)),
            "more_body": False,
        }
    )
