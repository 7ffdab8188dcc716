"""Serve on this machine, stopped: what was asked is answered first."""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

TIMEOUT_S = 30.0


def stop_serve(application: str, within_s: int) -> None:
    """End the application, then Serve. The controller ends itself, and never answers the call that asks it to: by
    itself, Serve's would be repeated for ever, and Ray says so on the terminal.
    """
    import ray
    from ray import serve
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    with suppress(ValueError, ray.exceptions.RayError):  # it is gone, now or already; or it takes too long
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
        states = _states(controller, application)
        if states and all(state == "STARTING" for state in states.values()):
            return  # nobody was asked anything yet: all may end with Ray, and not when they are up
        end_application(controller, application, states, within_s)
        ray.get(controller.graceful_shutdown.options(max_task_retries=0).remote(), timeout=TIMEOUT_S)
    serve.shutdown()


def end_application(controller: Any, application: str, states: Mapping[str, str], within_s: int) -> None:
    """Let replicas in these states finish what they were asked, as long as that may take. Serve's end would kill its
    proxies at once, and cut off every answer under way. Those that still start, in an update, were asked nothing: once
    the others have ended they are killed, for Serve would let them come up first. Raises RayError: the controller does
    not answer.
    """
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE

    starting = {name for name, state in states.items() if state == "STARTING"}
    ray.get(controller.delete_apps.remote([application]), timeout=TIMEOUT_S)
    give_up, ours = time.monotonic() + within_s, f"SERVE_REPLICA::{application}#"
    left = {ours}
    while time.monotonic() < give_up and left - starting:
        time.sleep(0.05)
        left = {each["name"] for each in ray.util.list_named_actors(True) if ours in each["name"]}
    for name in left & starting:
        with suppress(ValueError):  # it has just ended
            ray.kill(ray.get_actor(name, SERVE_NAMESPACE))


def _states(controller: Any, application: str) -> dict[str, str]:
    """Of its replicas, by the names of their actors. Raises RayError: the controller does not answer."""
    import ray

    details = ray.get(controller.get_serve_instance_details.remote(), timeout=TIMEOUT_S)
    deployments = details["applications"].get(application, {}).get("deployments", {}).values()
    return {each["actor_name"]: each["state"] for deployment in deployments for each in deployment["replicas"]}
