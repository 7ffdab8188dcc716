"""Object stores of our own, and what the environment must say of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

import fsspec


@contextmanager
def s3() -> Iterator[dict[str, str]]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        secrets = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
        yield {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"} | secrets
    finally:
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # which knows this server


@contextmanager
def gs() -> Iterator[dict[str, str]]:
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    try:
        host, port = server._api._httpd.server_address
        yield {"STORAGE_EMULATOR_HOST": f"http://{host}:{port}"}
    finally:
        server.stop()
        fsspec.get_filesystem_class("gs").clear_instance_cache()


def make_folder(environment: dict[str, str], bucket: str, path: str) -> None:
    """As the web pages of both do: an object without bytes, whose name ends in a slash."""
    if s3_url := environment.get("AWS_ENDPOINT_URL"):
        request = Request(f"{s3_url}/{bucket}/{path}/", b"", method="PUT")
    else:
        url = f"{environment['STORAGE_EMULATOR_HOST']}/upload/storage/v1/b/{bucket}/o"
        request = Request(f"{url}?uploadType=media&name={path}/", b" ", method="POST")  # it takes no empty one
    urlopen(request).close()
