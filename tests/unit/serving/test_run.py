"""What `openbook up` hands to Serve."""

from contextlib import nullcontext
from typing import Any

import pytest
from ray import cloudpickle

from openbook.config import Settings, parse
from openbook.serving.launch import run


def test_secrets_reach_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse(
        {
            "index": {"addresses": ["127.0.0.1:7000"], "admin_token": "correct-horse-battery"},
            "cache": {"url": "redis://:staple@127.0.0.1:6379/0"},
        }
    )
    deployed: list[Any] = []
    monkeypatch.setattr(run, "local_serve", lambda *_: nullcontext())
    monkeypatch.setattr(run, "deploy", lambda application, serving: deployed.append(application))
    with run.running(settings):
        (application,) = deployed
    arrived, *_ = cloudpickle.loads(cloudpickle.dumps(application._bound_deployment.init_args))
    assert isinstance(arrived, Settings)
    assert arrived == settings
    assert arrived.index.admin_token is not None
    assert arrived.index.admin_token.get_secret_value() == "correct-horse-battery"
