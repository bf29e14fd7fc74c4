"""ASGI app of a language model: routes, requests, responses, streams, disconnecting clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import TYPE_CHECKING

import msgspec
import torch

from ...contract.errors import ContextExceeded, FleetError, InvalidInput, NotFound, Unavailable
from ...contract.function.spec import LLMSettings
from ...contract.node.orders import SecondEngine
from ...contract.node.speed import Speed
from ...contract.worker_headers import CONTINUE_HEADER
from ...openai_api import responses as openai_responses
from ...openai_api.call_reader import CallReader
from ...openai_api.embeddings import EmbeddedText, EmbeddingCall, embeddings_body
from ...worker_io.asgi import JSON, ClientDisconnected, Receive, ResponseAborted, Scope, Send, respond
from ..engine.context_limit import InvalidPrompt
from ..engine.generation import Request
from ..engine.two_engines import TwoEngines
from ..model.loaded_model import LoadedModel
from ..model.weights import ModelWeights
from ..text.token_texts import TokenTexts
from .answer_writers import AnswerWriter, ChatWriter, Choice, TextWriter
from .connection import deadline_ns, read_body, while_connected
from .engine_call import EngineCall, engine_call, request_of
from .engine_service import DeltaStream, EngineService
from .engines import Adapters, load_engine
from .prompts import ChatPrompt, Prompts
from .requests import ChatCall, CompletionCall, PlainCall, StreamableCall
from .responses_api.requests import ResponsesCall, own_names
from .responses_api.writer import ResponsesWriter
from .served_models import ServedModels
from .stream_resume import split_body

if TYPE_CHECKING:
    from ..tensor_parallel.rank_process import RankProcesses

STREAMING = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PROMPT_FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
}
"""Field of each route's body that has the prompt."""
MARKED = (CONTINUE_HEADER.encode(), b"1")


def create_app(
    weights: ModelWeights,
    settings: LLMSettings,
    *,
    name: str,
    threads: int,
    ranks: RankProcesses | None = None,
    adapters: Adapters | None = None,
) -> LLMApp:
    """Loads the model and builds its app. `ranks`, `adapters`, errors: as of `load_engine`."""
    model = load_engine(weights, settings, threads=threads, ranks=ranks, adapters=adapters)
    return LLMApp(model, name=name, adapters=adapters or ())


class LLMApp:
    """ASGI app of one model, without lifespan."""

    def __init__(self, model: LoadedModel, *, name: str, adapters: Collection[str] = ()) -> None:
        self._model = model
        self._models = ServedModels(name, adapters)
        threads = model.torch_threads
        on_cpu = not torch.cuda.is_available()
        self.service = EngineService(model.engine, prepare=(lambda: torch.set_num_threads(threads)) if on_cpu else None)
        self._prompts = Prompts(model)
        self._token_texts = TokenTexts(model.tokenizer)
        self._chat_reader = CallReader(ChatCall, "chat")
        self._completion_reader = CallReader(CompletionCall, "completions")
        self._responses_reader = CallReader(ResponsesCall, "responses")
        self._embedding_reader = CallReader(EmbeddingCall, "embeddings")
        self._plain_reader = CallReader(PlainCall, "plain")
        self._routes: dict[str, tuple[str, Callable[[Scope, Receive, Send], Awaitable[None]]]] = {
            "/": ("POST", self._plain),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
            "/v1/responses": ("POST", self._respond),
            "/v1/embeddings": ("POST", self._embed),
            "/v1/models": ("GET", self._list_models),
        }

    def speed(self) -> Speed | None:
        """Mean latencies; None until one request has ended. From any thread."""
        return self.service.speed()

    def second_engine(self) -> SecondEngine | None:
        """State of the engine behind the first one; None without one. From any thread."""
        engine = self._model.engine
        return engine.second if isinstance(engine, TwoEngines) else None

    def release(self) -> None:
        """Gives weights and KV memory back; calls must wait for `regain`. Not on the loop."""
        self.service.release()

    def regain(self) -> None:
        """Takes weights and KV memory again. Not on the loop. Errors: those of loading."""
        self.service.regain()

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
                return await _end_stream(send, error)
            prompt = isinstance(error, ContextExceeded | InvalidPrompt)
            param = PROMPT_FIELDS.get(scope["path"].rstrip("/")) if prompt else None
            await openai_responses.respond_error(send, error, param)

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

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 200, msgspec.json.encode(self._models.listed()), JSON)

    async def _one_model(self, name: str, send: Send) -> None:
        body = self._models.one(self._models.adapter_of(name))
        await respond(send, 200, msgspec.json.encode(body), JSON)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, carried = split_body(scope["headers"], await read_body(receive))
        call = self._chat_reader.read(body)
        adapter = self._models.adapter_of(call.model)
        prompt = await self._prompts.chat(call.messages, call.tool_use(), call.answer_schema())
        answer = ChatWriter(
            self._models.shown(adapter), texts=self._texts(call), with_usage=call.with_usage, tools=prompt.tools
        )
        await self._answer_chat(call, adapter, prompt, answer, scope, carried, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, carried = split_body(scope["headers"], await read_body(receive))
        call = self._responses_reader.read(body)
        adapter = self._models.adapter_of(call.model)
        chat = call.chat()
        with own_names():
            prompt = await self._prompts.chat(chat.messages, chat.tool_use(), chat.answer_schema())
        answer = ResponsesWriter(self._models.shown(adapter), call, texts=self._texts(chat), tools=prompt.tools)
        await self._answer_chat(chat, adapter, prompt, answer, scope, carried, receive, send)

    async def _answer_chat(
        self,
        call: ChatCall,
        adapter: str,
        prompt: ChatPrompt,
        answer: AnswerWriter,
        scope: Scope,
        carried: bytes | None,
        receive: Receive,
        send: Send,
    ) -> None:
        work = engine_call(
            call,
            answer,
            [prompt.tokens],
            self._model,
            deadline_ns(scope),
            prompt.constraint,
            prompt.shown_tokens,
            adapter=adapter,
        )
        await self._answer(work, carried, receive, send)

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, carried = split_body(scope["headers"], await read_body(receive))
        call = self._completion_reader.read(body)
        adapter = self._models.adapter_of(call.model)
        prompts = [await self._prompts.text(prompt) for prompt in call.prompts()]
        answer = TextWriter(self._models.shown(adapter), texts=self._texts(call), with_usage=call.with_usage)
        work = engine_call(call, answer, prompts, self._model, deadline_ns(scope), adapter=adapter)
        await self._answer(work, carried, receive, send)

    async def _plain(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._plain_reader.read(await read_body(receive))
        adapter = self._models.adapter_of(call.model)
        if call.prompt is not None:
            tokens = await self._prompts.text(call.prompt)
        else:
            tokens = (await self._prompts.chat(call.messages or [])).tokens
        request = request_of(call, tokens, self._model, deadline_ns(scope), adapter)
        usage = openai_responses.TokenUsage(prompt_tokens=len(tokens))
        [choice] = await while_connected(receive, self._collect(self.service.open([request]), usage))
        body = {"text": choice.text, "finish_reason": choice.finish, "usage": usage.json()}
        await respond(send, 200, msgspec.json.encode(body), JSON)

    async def _embed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The vectors of texts: the last token's hidden state after the final norm, of length one."""
        call = self._embedding_reader.read(await read_body(receive))
        adapter = self._models.adapter_of(call.model)
        prompts = [await self._prompts.text(text) for text in call.texts()]
        deadline = deadline_ns(scope)
        requests = [
            Request(tokens=one, max_new_tokens=0, embeds=True, deadline_ns=deadline, adapter=adapter) for one in prompts
        ]
        states = await while_connected(receive, self._states(self.service.open(requests)))
        vectors = torch.nn.functional.normalize(torch.tensor(states), dim=1).tolist()
        embedded = [EmbeddedText(vector, len(tokens)) for vector, tokens in zip(vectors, prompts, strict=True)]
        body = await asyncio.to_thread(embeddings_body, call, embedded, model_name=self._models.shown(adapter))
        await respond(send, 200, msgspec.json.encode(body), JSON)

    @staticmethod
    async def _states(stream: DeltaStream) -> list[tuple[float, ...]]:
        async with stream:
            found = {index: delta.embedding async for index, delta in stream}
        return [found[index] for index in sorted(found)]

    def _texts(self, call: StreamableCall) -> TokenTexts | None:
        return None if call.wanted_logprobs() is None else self._token_texts

    async def _answer(self, work: EngineCall, carried: bytes | None, receive: Receive, send: Send) -> None:
        if work.stream:
            if carried:
                work = await asyncio.to_thread(work.resumed, carried, self._model.engine, self._model.vocab_size)
            elif carried is not None:
                work = work.with_marks()
            await while_connected(receive, self._send_stream(work, send))
            return
        stream = self.service.open(work.requests)
        choices = await while_connected(receive, self._collect(stream, work.usage, work.choices))
        await respond(send, 200, work.answer.whole(choices, work.usage), JSON)

    @staticmethod
    async def _collect(stream: DeltaStream, usage: openai_responses.TokenUsage, each: int = 1) -> list[Choice]:
        """The choices; `each`: how many a prompt has."""
        choices: dict[int, Choice] = {}
        async with stream:
            async for index, delta in stream:
                choices.setdefault(index, Choice()).add(delta)
                usage.count(len(delta.tokens), delta.cached_tokens if index % each == 0 else 0)
        return [choices[index] for index in sorted(choices)]

    async def _send_stream(self, work: EngineCall, send: Send) -> None:
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
    async def _chunks(work: EngineCall, stream: DeltaStream, to_do: list[int]) -> AsyncIterator[bytes]:
        """Events, each with its mark. `to_do`: the choices in the stream."""
        marker = work.marker
        async for number, delta in stream:
            index = to_do[number]
            cached_tokens = work.cached_tokens(index, delta)
            work.usage.count(len(delta.tokens), cached_tokens)
            if marker is not None:
                logprobs = delta.logprobs if work.answer.repeats_logprobs else ()
                marker.add(index, delta.tokens, logprobs, cached_tokens)
            if events := work.answer.feed(index, delta):
                yield events if marker is None else events + marker.mark()
        yield work.answer.closing(work.usage)


async def _end_stream(send: Send, error: FleetError) -> None:
    """Ends a stream with an error event and without [DONE], so that the text is not taken as complete."""
    await send(
        {
            "type": "http.response.body",
            "body": openai_responses.event(openai_responses.error_body(error)),
            "more_body": False,
        }
    )
