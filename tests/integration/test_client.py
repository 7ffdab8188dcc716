"""Both clients against a real server whose behaviour is scripted: what comes back, what is tried again, what fails."""

import asyncio
import math
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import tls_files
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import openbook
from openbook import errors
from openbook.cli import app
from openbook.client import (
    Answer,
    AsyncClient,
    Client,
    Excerpt,
    OwnPassage,
    Retrieval,
    RetrieverKind,
    Token,
    messages,
)
from openbook.client.connection import KEEPALIVE, Connection
from openbook.config import ServerTls
from openbook.core.types import Citation, Coverage, Decoding, Formulation, Passage
from openbook.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    InvalidConfig,
    InvalidRequest,
    OpenbookError,
    Overloaded,
    QuotaExceeded,
    ShardUnavailable,
    Unauthenticated,
)
from openbook.processes import free_port
from openbook.rag.answer import Alternative, Evidence, Label
from openbook.serving.endpoint.messages import (
    answer_to_proto,
    event_to_proto,
    request_from_proto,
    retrieval_to_proto,
)
from openbook.serving.endpoint.schemas import AnswerRequest, OwnPassageIn
from openbook.v1 import answer_pb2, answer_pb2_grpc
from openbook.wire import ERROR_HEADER

# --- results


def texts() -> st.SearchStrategy[str]:
    return st.text(max_size=8)


LOG_P = st.floats(max_value=0, allow_nan=False)
LOG_PS = st.lists(LOG_P, max_size=3).map(tuple)
TOKENS = st.lists(
    st.builds(Token, texts(), LOG_P, LOG_PS, st.integers(0, 9), st.integers(0, 9))
    | st.builds(Token, texts(), LOG_P, LOG_PS, st.none(), st.none()),
    max_size=2,
).map(tuple)
CITATIONS = st.lists(
    st.builds(Citation, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.floats(0, 1)), max_size=2
).map(tuple)
EVIDENCE = st.lists(
    st.builds(
        Evidence,
        st.builds(Passage, st.integers(-5, 2**62), texts(), texts(), texts()),
        st.floats(allow_nan=False),
        LOG_P,
        LOG_P,
    ),
    max_size=2,
).map(tuple)
FOUND: dict[str, Any] = {
    "evidence": EVIDENCE,
    "snapshot_id": texts(),
    "encoder_fingerprint": texts(),
    "complete": st.booleans(),
    "coverage": st.builds(
        Coverage, st.integers(0, 2**40), st.integers(0, 2**40), st.lists(st.integers(0, 99), max_size=2).map(tuple)
    ),
    "cached": st.booleans(),
    "request_id": texts(),
    "timings": st.dictionaries(texts(), st.floats(0, 100), max_size=2),
}
RETRIEVALS = st.builds(Retrieval, **FOUND)
ALTERNATIVES = st.builds(Alternative, texts(), LOG_P, LOG_PS, TOKENS, CITATIONS, st.booleans())
ANSWERS = st.builds(
    Answer,
    text=texts(),
    log_likelihood=LOG_P,
    formulation=st.sampled_from(Formulation),
    decoding=st.sampled_from(Decoding),
    generator_fingerprint=texts(),
    labels=st.lists(st.builds(Label, texts(), LOG_P, LOG_P), max_size=2).map(tuple),
    tokens=TOKENS,
    citations=CITATIONS,
    answers=st.lists(ALTERNATIVES, max_size=2).map(tuple),
    abstained=st.booleans(),
    confidence=st.none() | st.floats(0, 1),
    cut=st.booleans(),
    **FOUND,
)


@given(answer=ANSWERS, retrieval=RETRIEVALS, tokens=TOKENS)
def test_what_the_pipeline_gave_is_what_the_caller_gets(
    answer: Answer, retrieval: Retrieval, tokens: tuple[Token, ...]
) -> None:
    assert messages.answer(answer_to_proto(answer)) == answer
    assert messages.retrieval(retrieval_to_proto(retrieval)) == retrieval
    for event in (answer, retrieval, *tokens):
        assert messages.event(event_to_proto(event)) == event


def all_errors(root: type[OpenbookError] = OpenbookError) -> Iterator[type[OpenbookError]]:
    yield root
    for child in root.__subclasses__():
        yield from all_errors(child)


OURS = {kind for kind in all_errors() if kind.__module__ == errors.__name__}  # others stay in their process


@pytest.mark.parametrize("kind", sorted(OURS, key=lambda kind: kind.__name__))
def test_errors_cross_processes(kind: type[OpenbookError]) -> None:
    again = pickle.loads(pickle.dumps(kind("what is wrong")))  # noqa: S301  # it is our own
    assert (type(again), str(again)) == (kind, "what is wrong")


# --- calls

FAILING = {
    "bad": answer_pb2.BatchError(code=8, message="no place", retry_after_s=7),
    "used up": answer_pb2.BatchError(code=8, message="60 of 60", retry_after_s=9, name="QuotaExceeded"),
    "large": answer_pb2.BatchError(code=3, message="x" * (5 << 20)),
}


@dataclass
class Script(answer_pb2_grpc.AnswerServiceServicer):
    """Fails as it is told to, one call after the other, then answers."""

    failures: list[tuple[grpc.StatusCode, tuple[tuple[str, str], ...]]] = field(default_factory=list)
    n_calls: int = 0
    seen: dict[str, Any] = field(default_factory=dict)
    holds: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    def Answer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.n_calls += 1
        self.seen = {"request": request, **dict(context.invocation_metadata())}
        if request.question == "wait":
            context.add_callback(self.left.set)
            self.holds.set()
            self.left.wait(30)
        if self.failures:
            code, trailing = self.failures.pop(0)
            context.set_trailing_metadata(trailing)
            context.abort(code, f"scripted {code.name}")
        return answer_pb2.AnswerResponse(answer=request.question.upper(), formulation=1, decoding=1)

    def AnswerBatch(self, request: Any, context: Any) -> Any:  # noqa: N802
        results = [
            answer_pb2.BatchResult(answer=self.Answer(each, context))
            if each.question not in FAILING
            else answer_pb2.BatchResult(error=FAILING[each.question])
            for each in request.requests
        ]
        self.seen = {"request": request}
        return answer_pb2.AnswerBatchResponse(results=results)

    def AnswerStream(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        if request.question == "wait":
            context.add_callback(self.left.set)
        yield answer_pb2.AnswerEvent(retrieved=answer_pb2.RetrieveResponse(snapshot_id="s"))
        yield answer_pb2.AnswerEvent(token=answer_pb2.Token(text="a"))
        yield answer_pb2.AnswerEvent(answer=self.Answer(request, context))

    def GetPassage(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.seen = {"request": request}
        passage = {"document_id": request.id}
        return answer_pb2.Excerpt(passage=passage, after=[{}] * request.around, snapshot_id=request.snapshot_id)

    def Retrieve(self, request: Any, context: Any) -> Any:  # noqa: N802
        return answer_pb2.RetrieveResponse(snapshot_id="s", evidence=[{"passage": {"id": request.k}}])


@contextmanager
def serving(
    script: answer_pb2_grpc.AnswerServiceServicer | None, tls: ServerTls | None = None, host: str = "127.0.0.1"
) -> Iterator[str]:
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        if script:
            answer_pb2_grpc.add_AnswerServiceServicer_to_server(script, server)
        if tls:
            pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
            port = server.add_secure_port(f"{host}:0", grpc.ssl_server_credentials([pair]))
        else:
            port = server.add_insecure_port(f"{host}:0")
        server.start()
        try:
            yield f"{host}:{port}"
        finally:
            server.stop(0).wait()


class Blocking:
    """Asks with one kind of client, the other below: the same calls, the same results."""

    def __init__(self, address: str, **options: Any) -> None:
        self.make = lambda: Client(address, **options)

    def answer(self, question: str, **options: Any) -> Answer:
        with self.make() as client:
            return client.answer(question, **options)

    def batch(self, questions: list[str]) -> list[Answer | OpenbookError]:
        with self.make() as client:
            return client.answer_batch(questions, k=3, request_id="mine")

    def stream(self, question: str, **options: Any) -> list[Any]:
        with self.make() as client:
            return list(client.stream(question, **options))

    def retrieve(self, question: str, **options: Any) -> Retrieval:
        with self.make() as client:
            return client.retrieve(question, **options)

    def passage(self, *asked: Any) -> Excerpt:
        with self.make() as client:
            return client.passage(*asked)


class Asynchronous:
    def __init__(self, address: str, **options: Any) -> None:
        self.make = lambda: AsyncClient(address, **options)

    def run(self, use: Callable[[AsyncClient], Any]) -> Any:
        async def scenario() -> Any:
            async with self.make() as client:
                return await use(client)

        return asyncio.run(scenario())

    def answer(self, question: str, **options: Any) -> Any:
        return self.run(lambda client: client.answer(question, **options))

    def batch(self, questions: list[str]) -> Any:
        return self.run(lambda client: client.answer_batch(questions, k=3, request_id="mine"))

    def stream(self, question: str, **options: Any) -> Any:
        async def events(client: AsyncClient) -> list[Any]:
            return [event async for event in client.stream(question, **options)]

        return self.run(events)

    def retrieve(self, question: str, **options: Any) -> Any:
        return self.run(lambda client: client.retrieve(question, **options))

    def passage(self, *asked: Any) -> Any:
        return self.run(lambda client: client.passage(*asked))


CLIENTS = pytest.mark.parametrize("kind", [Blocking, Asynchronous])
BUSY, GONE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE
SOON, NEVER = ("grpc-retry-pushback-ms", "1"), ("grpc-retry-pushback-ms", "-1")


@CLIENTS
def test_every_call_gives_its_result(kind: Any) -> None:
    script = Script()
    with serving(script) as address:
        asked = kind(address, api_key="ob_secret\n")
        own = OwnPassage("text", "title", "mine")
        assert asked.answer("who", k=0, labels=["a", "b"], passages=[own], formulation=Formulation.TOKEN).text == "WHO"
        assert script.seen["authorization"] == "Bearer ob_secret"
        request = script.seen["request"]
        assert (list(request.labels), request.k, request.HasField("n_beams")) == (["a", "b"], 0, False)
        assert request.formulation == answer_pb2.FORMULATION_TOKEN
        assert [(each.text, each.title, each.document_id) for each in request.passages] == [("text", "title", "mine")]
        assert request.timeout_s == 30
        found, token, answer = asked.stream("why", n_beams=2)
        assert (found.snapshot_id, token.text, answer.text) == ("s", "a", "WHY")
        assert (script.seen["request"].formulation, script.seen["request"].n_beams) == (2, 2)
        assert asked.retrieve("who", k=9).evidence[0].passage.id == 9
        excerpt = asked.passage(7, 2, "s")
        assert (excerpt.passage.document_id, len(excerpt.after), excerpt.snapshot_id) == ("7", 2, "s")
        assert script.seen["request"].timeout_s == 30
        with pytest.raises(InvalidRequest, match=r"^around must be an int of 0\.\.4294967295, got -1$"):
            asked.passage(7, -1)
        one, failed, other, spent = asked.batch(["one", "bad", "other", "used up"])
        assert (one.text, other.text) == ("ONE", "OTHER")
        assert (type(failed), str(failed), failed.retry_after_s) == (Overloaded, "no place", 7.0)
        assert (type(spent), spent.retry_after_s) == (QuotaExceeded, 9.0)
        batch = script.seen["request"]
        assert (batch.request_id, batch.timeout_s) == ("mine", 30)
        assert {(each.k, each.request_id) for each in batch.requests} == {(3, "")}, "each question gets its own id"
        with pytest.raises(InvalidRequest, match=r"^k must be an int of 0\.\.4294967295, got -1$"):
            asked.answer("who", k=-1)


class Refusing(answer_pb2_grpc.AnswerServiceServicer):
    """Whatever it is asked for."""

    def __init__(self) -> None:
        self.keys: list[Any] = []

    def refuse(self, request: Any, context: Any) -> Any:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        context.set_trailing_metadata((NEVER, ("retry-after", "9"), (ERROR_HEADER, "QuotaExceeded")))
        context.abort(BUSY, "60 of 60")

    Answer = AnswerBatch = AnswerStream = Retrieve = GetPassage = refuse


@CLIENTS
def test_every_call_shows_the_key_and_raises_what_the_server_raised(kind: Any) -> None:
    server = Refusing()
    with serving(server) as address:
        asked = kind(address, api_key="ob_secret", retries=False)
        calls = [partial(call, "who") for call in (asked.answer, asked.stream, asked.retrieve, asked.passage)]
        for call in (*calls, partial(asked.batch, ["who"])):
            with pytest.raises(QuotaExceeded, match=r"^60 of 60$") as raised:
                call()
            assert raised.value.retry_after_s == 9
    assert server.keys == ["Bearer ob_secret"] * 5


@pytest.mark.parametrize(
    "words", ["ask who --server {}", "explain who --server {}", "passages get {} 7", "passages around {} 7"]
)
def test_commands_show_the_key_of_their_environment(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Refusing()
    monkeypatch.setenv("OPENBOOK_API_KEY", "ob_secret")
    with serving(server) as address:
        done = CliRunner().invoke(app, words.format(address).split())
    assert isinstance(done.exception, QuotaExceeded)
    assert server.keys == ["Bearer ob_secret"]


def test_passages_around_one_are_asked_of_an_endpoint_too() -> None:
    with serving(Script()) as address:
        lines = [
            CliRunner().invoke(app, ["passages", *words, address, "7", "--json"]).stdout
            for words in (["get"], ["around", "-n", "1"], ["around"])
        ]
    assert [each.count("\n") for each in lines] == [1, 2, 3]


def test_what_is_neither_a_folder_nor_an_endpoint_is_told_so() -> None:
    done = CliRunner().invoke(app, ["passages", "get", "/no/such/folder", "7"])
    told = "/no/such/folder: no such folder, and an endpoint must be host:port with a port of 1..65535"
    assert (type(done.exception), str(done.exception)) == (InvalidRequest, told)


def test_an_empty_passage_is_refused_as_over_http() -> None:
    asked = messages.request(answer_pb2.AnswerRequest, "who", 1, {"passages": [""]})
    found = request_from_proto(AnswerRequest, asked, 1)
    assert found.passages == (OwnPassageIn(text=""),)  # what reads it knows the limits


def test_the_servers_own_refusal_comes_before_ours() -> None:
    assert Connection("127.0.0.1:1", timeout_s=5.0).call()["timeout"] > 5.0


def test_an_error_of_a_later_version_is_one_too() -> None:
    results = [{"error": {"code": code, "message": "full"}} for code in (99, 8)]
    later, full = messages.outcomes(answer_pb2.AnswerBatchResponse(results=results))
    assert (type(later), str(later)) == (OpenbookError, "UNKNOWN: full")
    assert isinstance(full, Overloaded)
    assert full.retry_after_s == Overloaded("").retry_after_s, "where it does not say when"


@CLIENTS
def test_what_comes_back_may_be_larger_than_what_may_be_asked(kind: Any) -> None:
    with serving(Script()) as address:
        (found,) = kind(address).batch(["large"])
    assert len(str(found)) > 4 << 20


def test_a_client_that_is_left_has_closed_its_connection() -> None:
    async def scenario(address: str) -> None:
        async with AsyncClient(address) as client:
            await client.answer("who")
        with pytest.raises(Exception, match=r"[Cc]losed"):
            await client.answer("who")

    with serving(Script()) as address:
        with Client(address) as client:
            client.answer("who")
        with pytest.raises(ValueError, match="closed"):
            client.answer("who")
        asyncio.run(scenario(address))


@pytest.mark.parametrize("given", ["yes", b"yes", {"yes": 1}, 7])
def test_what_is_no_list_is_not_taken_for_one_of_its_letters(given: Any) -> None:
    for name in ("labels", "without", "passages"):
        with pytest.raises(InvalidRequest, match=f"^{name} must be a list, got {given!r}$"):
            messages.request(answer_pb2.AnswerRequest, "who", 1.0, {name: given})
    with pytest.raises(InvalidRequest, match=f"^questions must be a list, got {given!r}$"):
        messages.batch(given, 1.0, {})


def test_what_can_be_read_once_is_no_list() -> None:
    """All questions of a batch have the same options."""
    for name in ("labels", "without", "passages"):
        with pytest.raises(InvalidRequest, match=f"^{name} must be a list, got <"):
            messages.batch(["who", "what"], 1.0, {name: iter(["yes", "no"])})


def test_own_passages_are_values_or_fields_or_texts() -> None:
    given = [OwnPassage("a", "t"), {"text": "b", "document_id": "d"}, "c"]
    sent = messages.request(answer_pb2.AnswerRequest, "who", 1.0, {"passages": given}).passages
    told = [(each.text, each.title, each.document_id) for each in sent]
    assert told == [("a", "t", ""), ("b", "", "d"), ("c", "", "")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a", 7], r"passages\[1\] must be a text, or have the fields text, title and document_id, got 7"),
        ([{"text": "a", "name": "b"}], r"passages\[0\] must be .*, got {'text': 'a', 'name': 'b'}"),
        ([{"text": 7}], r"passages\[0\] must be .*, got {'text': 7}"),
        ([["a"]], r"passages\[0\] must be .*, got \['a'\]"),
    ],
)
def test_what_is_no_passage_is_refused_by_its_place(given: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}$"):
        messages.request(answer_pb2.AnswerRequest, "who", 1.0, {"passages": given})


@pytest.mark.parametrize(
    ("option", "names"),
    [("formulation", Formulation), ("decoding", Decoding), ("retriever", RetrieverKind)],
)
def test_names_may_be_given_as_texts(option: str, names: Any) -> None:
    for name in names:
        of_each = [messages.request(answer_pb2.AnswerRequest, "who", 1, {option: each}) for each in (name, str(name))]
        assert of_each[0] == of_each[1]
        assert request_from_proto(AnswerRequest, of_each[0], 0).model_dump()[option] == name
    with pytest.raises(InvalidRequest, match=f"{option} must be one of {', '.join(names)}, got 'other'"):
        messages.request(answer_pb2.AnswerRequest, "who", 1, {option: "other"})


def test_what_its_field_does_not_hold_is_refused_by_name() -> None:
    floats = "a float of -1.7976931348623157e+308..1.7976931348623157e+308"
    for option, value, wanted in (
        ("seed", -1, "seed must be an int of 0..18446744073709551615"),
        ("without", [1 << 63], "each of without must be an int of -9223372036854775808..9223372036854775807"),
        ("without", ["a"], "each of without must be an int of -9223372036854775808..9223372036854775807"),
        ("temperature", 10**400, f"temperature must be {floats}"),
        ("timeout_s", -(10**400), f"timeout_s must be {floats}"),
        ("min_coverage", "x", f"min_coverage must be {floats}"),
        ("k", "3", "k must be an int of 0..4294967295"),
        ("k", 3.5, "k must be an int of 0..4294967295"),
        ("tokens", "yes", "tokens must be True or False"),
        ("tokens", 2, "tokens must be True or False"),
        ("temperature", True, f"temperature must be {floats}"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            messages.request(answer_pb2.AnswerRequest, "who", 1, {option: value})
        assert str(refused.value) == f"{wanted}, got {value!r:.100}"


def test_what_is_no_text_is_refused_by_name() -> None:
    for option, value, name in (("labels", [1], "each of labels"), ("request_id", 4, "request_id")):
        with pytest.raises(InvalidRequest, match=rf"^{name} must be text in UTF-8, .*, got \[?{value}"):
            messages.request(answer_pb2.AnswerRequest, "who", 1, {option: value})


@pytest.mark.parametrize(
    ("field", "of"),
    [
        ("question", lambda text: messages.request(answer_pb2.AnswerRequest, text, 1, {})),
        ("each of labels", lambda text: messages.request(answer_pb2.AnswerRequest, "who", 1, {"labels": [text]})),
        ("question", lambda text: messages.batch(["who", text], 1, {})),
        ("request_id", lambda text: messages.batch(["who"], 1, {"request_id": text})),
        ("id", lambda text: messages.passage_request(text, 0, "", 1)),
        ("snapshot_id", lambda text: messages.passage_request(7, 0, text, 1)),
    ],
)
def test_a_text_that_utf_8_does_not_hold_is_refused_by_name(field: str, of: Callable[[str], Any]) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field} must be text in UTF-8, not bytes of .*\\udc80") as refused:
        of("\udc80" * 1000)
    assert len(str(refused.value)) < 1000


def test_protobufs_slow_implementation_refuses_as_well() -> None:
    asks = "messages.request(AnswerRequest, '\\udc80', 1, {})"
    code = f"from openbook.client import messages; from openbook.v1.answer_pb2 import AnswerRequest; {asks}"
    slow = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    done = subprocess.run([sys.executable, "-c", code], env=slow, capture_output=True, text=True, check=False)
    assert "InvalidRequest: question must be text in UTF-8, not bytes of " in done.stderr


@CLIENTS
def test_an_endpoint_of_this_machine_is_asked_without_a_proxy(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with serving(Script()) as address:
        assert kind(address, retries=False).answer("who").text == "WHO"


def given_up_after_ms(address: str) -> set[int]:
    """Of the connections of this process to there, how long each waits for what it sent to arrive."""
    found, port = set(), int(address.rpartition(":")[2])
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or without another end
            if file.is_socket():
                with socket.socket(fileno=os.dup(int(file.name))) as connection:
                    if connection.getpeername()[1:2] == (port,):
                        found.add(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT is Linux's")
def test_a_connection_on_which_nothing_arrives_is_given_up() -> None:
    with serving(Script()) as address, Client(address) as client:
        client.answer("who")
        assert given_up_after_ms(address) == {20_000}
    assert KEEPALIVE["grpc.keepalive_time_ms"] > 300_000  # more pings than that gRPC's servers take for an attack


@CLIENTS
def test_what_grpc_itself_finds_too_large_is_said_to_be(kind: Any) -> None:
    with serving(Script()) as address, pytest.raises(BodyTooLarge, match=r"than the endpoint takes: .*vs\. 4194304"):
        kind(address, retries=False).answer("x" * (5 << 20))


@contextmanager
def speaking(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """Whoever takes one connection, and says something else than gRPC of ours."""
    with ThreadPoolExecutor(1) as threads, socket.create_server(("127.0.0.1", 0)) as listener:

        def once() -> None:
            connection, _ = listener.accept()
            with connection:
                talk(connection)

        told = threads.submit(once)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        told.result(10)


def http_1(connection: socket.socket) -> None:
    connection.recv(1)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def http_2(status: bytes, connection: socket.socket) -> None:
    """What it is asked for is not there, or is none of what is asked there, or a proxy refuses it."""
    connection.sendall(b"\0\0\0\4\0\0\0\0\0")  # settings, of which none
    with connection.makefile("rb") as sent:
        sent.read(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        while (frame := sent.read(9))[3] != 1:  # of headers
            sent.read(int.from_bytes(frame[:3], "big"))
        connection.sendall(b"\0\0\5\1\5" + frame[5:] + b"\x08\x03" + status)
        connection.shutdown(socket.SHUT_WR)
        sent.read()  # what is not read when it closes would take the answer with it


@CLIENTS
@pytest.mark.parametrize("talk", [http_1, *(partial(http_2, b"40%d" % i) for i in (0, 3, 4))])
def test_a_port_that_is_not_an_endpoints_grpc_port_is_said_to_be_another(kind: Any, talk: Any) -> None:
    hint = r"is that an endpoint's gRPC port \(.* 9000 .*\), .* or does a proxy refuse\?"
    with speaking(talk) as address, pytest.raises(OpenbookError, match=hint):
        kind(address, timeout_s=5, retries=False).answer("who")


@CLIENTS
def test_where_nobody_listens_it_is_said(kind: Any) -> None:
    with pytest.raises(ShardUnavailable, match=r"Connection refused; nobody listens there: does the endpoint run"):
        kind(f"127.0.0.1:{free_port()}", timeout_s=5, retries=False).answer("who")


@CLIENTS
def test_grpc_of_something_else_or_of_another_version_is_said_to_be(kind: Any) -> None:
    with serving(None) as address, pytest.raises(OpenbookError, match="or one of another version, or"):
        kind(address, retries=False).answer("who")


@CLIENTS
def test_who_asks_in_the_clear_where_tls_is_spoken_hears_of_it(kind: Any, tmp_path: Path) -> None:
    server, _ = tls_files(tmp_path)
    with (
        serving(Script(), server) as address,
        pytest.raises(ShardUnavailable, match="may want TLS: tls or tls_ca, --tls or"),
    ):
        kind(address, timeout_s=5, retries=False).answer("who")


@CLIENTS
def test_at_localhost_the_reason_is_told_of_the_address_that_answers(kind: Any, tmp_path: Path) -> None:
    server, client = tls_files(tmp_path, "localhost")
    with serving(Script(), server) as address:
        here = f"localhost:{address.rpartition(':')[2]}"
        assert kind(here, tls_ca=client.ca).answer("who").text == "WHO"
        with pytest.raises(ShardUnavailable, match="may want TLS: tls or tls_ca, --tls or"):  # not that ::1 refuses
            kind(here, timeout_s=5).answer("who")


@CLIENTS
def test_localhost_is_ipv6_too(kind: Any) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(Script(), host="[::1]") as address:
        assert kind(f"localhost:{address.rpartition(':')[2]}").answer("who").text == "WHO"


@CLIENTS
def test_a_date_to_come_again_at_changes_no_error(kind: Any) -> None:
    at = ("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT")
    with serving(Script([(BUSY, (NEVER, at))])) as address, pytest.raises(Overloaded, match="scripted") as raised:
        kind(address).answer("who")
    assert raised.value.retry_after_s == Overloaded("").retry_after_s


@CLIENTS
@pytest.mark.parametrize(
    ("failures", "error", "n_calls"),
    [
        ([(GONE, ()), (BUSY, (SOON,))], None, 3),
        ([(BUSY, (SOON,))] * 4, Overloaded, 4),
        ([(BUSY, (NEVER, ("retry-after", "60")))], Overloaded, 1),
        ([(grpc.StatusCode.UNAUTHENTICATED, ())], Unauthenticated, 1),
        ([(grpc.StatusCode.INVALID_ARGUMENT, ())], InvalidRequest, 1),
        ([(grpc.StatusCode.INTERNAL, ())], OpenbookError, 1),
    ],
)
def test_what_may_be_tried_again_is_until_the_server_says_no(
    kind: Any, failures: Any, error: type[OpenbookError] | None, n_calls: int
) -> None:
    script = Script(list(failures))
    with serving(script) as address:
        if error is None:
            assert kind(address).answer("who").text == "WHO"
        else:
            with pytest.raises(error, match="scripted") as raised:
                kind(address).answer("who")
            if n_calls == 1 and isinstance(raised.value, Overloaded):
                assert raised.value.retry_after_s == 60
        assert script.n_calls == n_calls
        script.failures = [(GONE, ())]
        with pytest.raises(ShardUnavailable):
            kind(address, retries=False).answer("who")


@CLIENTS
def test_what_is_tried_again_may_be_as_large_as_the_endpoint_takes(kind: Any) -> None:
    script = Script([(GONE, ())])
    with serving(script) as address:
        assert len(kind(address).answer("x" * ((4 << 20) - 100)).text) == (4 << 20) - 100
    assert script.n_calls == 2


def test_retries_have_a_budget() -> None:
    script = Script([(BUSY, (SOON,))] * 1000)
    with serving(script) as address, Client(address) as client:
        for _ in range(20):
            with pytest.raises(Overloaded):
                client.answer("who")
    assert script.n_calls < 20 + 10  # and not 80


@CLIENTS
def test_nobody_there_is_said_and_a_deadline_is_kept(kind: Any) -> None:
    with serving(Script()) as address:
        pass
    with pytest.raises(ShardUnavailable):
        kind(address, timeout_s=20).answer("who")
    script = Script()
    with serving(script) as address:
        with pytest.raises(DeadlineExceeded):
            kind(address, timeout_s=0.01).answer("wait")
        assert script.left.wait(30), "the call was cancelled"


def test_a_task_that_is_cancelled_cancels_its_call() -> None:
    script = Script()

    async def scenario(address: str) -> None:
        async with AsyncClient(address) as client:
            task = asyncio.create_task(client.answer("wait"))
            await asyncio.to_thread(script.holds.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(script.left.wait, 30)

    with serving(script) as address:
        asyncio.run(scenario(address))


async def by_closing(events: AsyncGenerator[Any]) -> None:
    async with aclosing(events):
        async for _ in events:
            break


async def by_breaking(events: AsyncGenerator[Any]) -> None:
    async for _ in events:
        break
    del events  # so that the event loop closes it


async def by_being_cancelled(events: AsyncGenerator[Any]) -> None:
    pondered = asyncio.Event()

    async def ponder() -> None:
        async for _ in events:
            pondered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(ponder())
    await pondered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [by_closing, by_breaking, by_being_cancelled])
def test_who_leaves_a_stream_ends_its_call(leave: Callable[[Any], Awaitable[None]]) -> None:
    script = Script()

    async def scenario(address: str) -> None:
        async with AsyncClient(address) as client:
            await leave(client.stream("wait"))
            assert await asyncio.to_thread(script.left.wait, 10)

    with serving(script) as address:
        try:
            asyncio.run(scenario(address))
        finally:
            script.left.set()


@CLIENTS
def test_tls(kind: Any, tmp_path: Path) -> None:
    server, client = tls_files(tmp_path)
    with serving(Script(), server) as address:
        assert kind(address, tls_ca=client.ca).answer("who").text == "WHO"
        for other in (False, True):  # in the clear, and by the authorities that this machine trusts
            with pytest.raises(ShardUnavailable):
                kind(address, tls=other, retries=False).answer("who")
    with pytest.raises(InvalidConfig, match=rf"its files cannot be used: {re.escape(__file__)}: "):
        kind("127.0.0.1:1", tls_ca=__file__).answer("who")
    with pytest.raises(InvalidConfig, match=rf"cannot be used: {server.certificate} with {client.ca}: "):
        kind("127.0.0.1:1", tls=True, tls_cert=server.certificate, tls_key=client.ca).answer("who")
    with pytest.raises(InvalidConfig, match=r"nowhere\.pem: cannot be read"):
        kind("127.0.0.1:1", tls_ca=tmp_path / "nowhere.pem").answer("who")
    with pytest.raises(InvalidConfig, match="tls_cert and tls_key must be given together"):
        kind("127.0.0.1:1", tls_ca=client.ca, tls_cert=client.ca).answer("who")
    with pytest.raises(InvalidConfig, match="and tls_ca or tls with them"):
        kind("127.0.0.1:1", tls_cert=server.certificate, tls_key=server.key).answer("who")


@CLIENTS
def test_tls_trusts_whom_this_machine_trusts(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = tls_files(tmp_path)
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(client.ca))  # as OpenSSL has it, and so all else that asks over TLS
    with serving(Script(), server) as address:
        assert kind(address, timeout_s=5, tls=True, retries=False).answer("who").text == "WHO"


@pytest.mark.parametrize("command", [["ask", "who", "--server"], ["passages", "around", "-n", "1"]])
def test_commands_too_trust_whom_this_machine_trusts(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = tls_files(tmp_path)
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(client.ca))
    with serving(Script(), server) as address:
        after = ["1"] if command[0] == "passages" else []
        done = CliRunner().invoke(app, [*command, address, *after, "--tls"], catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")


@CLIENTS
def test_files_of_tls_in_ones_home_are_found(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    server, _ = tls_files(tmp_path)
    with serving(Script(), server) as address:
        assert kind(address, tls_ca="~/ca.pem").answer("who").text == "WHO"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_bad_settings_are_refused_by_name(kind: Any) -> None:
    for address in ("http://127.0.0.1:8000", "localhost", "localhost:0", ":9000", f"localhost:{9000 + 65536}"):
        with pytest.raises(InvalidConfig, match="address must be host:port"):
            kind(address)
    for timeout_s in (0, -1, math.nan, math.inf, 1e10):
        with pytest.raises(InvalidConfig, match="timeout_s must be above 0"):
            kind("127.0.0.1:1", timeout_s=timeout_s)
    for key in ("ob_se\ncret", "ob_secrét"):
        with pytest.raises(InvalidConfig, match="printable ASCII") as refused:
            kind("127.0.0.1:1", api_key=key)
        assert "ob_" not in str(refused.value)
    for name, value, wanted in (
        ("address", None, "address must be host:port"),
        ("address", b"localhost:1", "address must be host:port"),
        ("address", "\udc00:1", "address must be host:port"),
        ("timeout_s", "30", "timeout_s must be above 0"),
        ("timeout_s", None, "timeout_s must be above 0"),
        ("tls_ca", "", "tls_ca must be the path of a file, or None"),  # in the clear without a word
        ("tls_ca", 5, "tls_ca must be the path of a file, or None"),
        ("retries", "no", "retries must be True or False"),
    ):
        with pytest.raises(InvalidConfig, match=wanted) as refused:
            kind(**{"address": "127.0.0.1:1", name: value})
        assert str(refused.value).endswith(f", got {value!r}")
    with pytest.raises(InvalidConfig, match=r"^api_key must be text, got bytes$"):
        kind("127.0.0.1:1", api_key=b"ob_secret")


def test_the_clients_stand_at_the_top() -> None:
    assert (openbook.Client, openbook.AsyncClient) == (Client, AsyncClient)
    with pytest.raises(AttributeError, match="no attribute 'Servant'"):
        openbook.Servant  # noqa: B018


def test_an_option_that_there_is_not_is_refused_by_its_name() -> None:
    for kind, name in ((answer_pb2.AnswerRequest, "kk"), (answer_pb2.RetrieveRequest, "n_beams")):
        with pytest.raises(InvalidRequest, match=f"^there is no option '{name}' here$"):
            messages.request(kind, "who", 1.0, {name: 2})
