"""What the configurations in deploy/chat make chat interfaces send is answered."""

from pathlib import Path
from urllib.parse import urlsplit

import yaml
from small_endpoint import QUESTION, request

CHAT = Path(__file__).parents[3] / "deploy/chat"


def test_librechat_gets_a_searched_answer() -> None:
    (endpoint,) = yaml.safe_load((CHAT / "librechat.yaml").read_text(encoding="utf-8"))["endpoints"]["custom"]
    (model,) = endpoint["models"]["default"]
    assert model in [each["id"] for each in request("GET", "/v1/models").json()["data"]]
    # What it sends by default, as its documentation says.
    sent = {"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "user": "id", "stop": None}
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], **sent}
    body = {name: value for name, value in body.items() if name not in endpoint["dropParams"]}
    assert not {"temperature", "top_p"} & set(body)
    path = urlsplit(endpoint["baseURL"]).path
    reply = request("POST", f"{path}/chat/completions", json={**body, "stream": True})
    assert (reply.status_code, reply.text.strip().split("\n")[-1]) == (200, "data: [DONE]")


def test_open_webui_gets_an_answer_and_asks_nothing_by_itself() -> None:
    lines = (CHAT / "open-webui.env").read_text(encoding="utf-8").splitlines()
    said = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    path = urlsplit(said["OPENAI_API_BASE_URL"]).path
    assert said["DEFAULT_MODELS"] in [each["id"] for each in request("GET", f"{path}/models").json()["data"]]
    assert {value for name, value in said.items() if name.endswith("_GENERATION")} == {"false"}
    body = {"model": said["DEFAULT_MODELS"], "messages": [{"role": "user", "content": QUESTION}], "stream": True}
    headers = {"authorization": f"Bearer {said['OPENAI_API_KEY']}"}
    assert request("POST", f"{path}/chat/completions", json=body, headers=headers).status_code == 200
