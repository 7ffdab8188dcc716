"""grpc.reflection.v1 beside Serve's own v1alpha: newer tools ask for it first, some for nothing else.

Both have the same messages in different packages.
"""

from typing import Any

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

SERVICE = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: Any, services: list[str]) -> None:
    """Answer it on Serve's server itself, as that answers v1alpha: no replica is asked, for all know the same.

    A Serve that hands every call to a replica has v1alpha alone.
    """
    if not callable(getattr(server, "add_passthrough_service", None)):
        return
    _describe()
    servicer = reflection.aio.ReflectionServicer([*services, SERVICE])
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_passthrough_service(SERVICE)
    handlers = {"ServerReflectionInfo": method}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _describe() -> None:
    """Its own file, for who asks what it is."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(SERVICE)
    except KeyError:
        file = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        renamed = text_format.MessageToString(file).replace("v1alpha", "v1")
        pool.AddSerializedFile(text_format.Parse(renamed, FileDescriptorProto()).SerializeToString())
