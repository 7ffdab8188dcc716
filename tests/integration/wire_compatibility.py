"""Whether messages and calls of one version of the protos mean the same to another."""

from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet

Field = FieldDescriptorProto


def broken(former: FileDescriptorSet, present: FileDescriptorSet) -> list[str]:
    """What the former version says that the present one would misread, by name; additions break nothing.

    A field may only go if its number is reserved, or it could come to mean something else.
    """
    return [*_messages(former, present), *_enums(former, present), *_calls(former, present)]


def _messages(former: FileDescriptorSet, present: FileDescriptorSet) -> Iterator[str]:
    now = dict(_all_messages(present))
    for name, message in _all_messages(former):
        if name not in now:
            yield f"{name} is gone"
            continue
        fields = {field.number: field for field in now[name].field}
        reserved = {n for each in now[name].reserved_range for n in range(each.start, each.end)}
        for field in message.field:
            found = fields.get(field.number)
            if found is None:
                if field.number not in reserved:
                    yield f"{name}.{field.name} = {field.number} is gone, and its number is not reserved"
            elif _means(found) != _means(field):
                yield f"{name}.{field.name} = {field.number} was {_means(field)}, is {_means(found)}"


def _means(field: FieldDescriptorProto) -> tuple[object, ...]:
    """What the bytes of a field depend on, and its name, which JSON has."""
    return field.name, Field.Type.Name(field.type), field.type_name, Field.Label.Name(field.label)


def _enums(former: FileDescriptorSet, present: FileDescriptorSet) -> Iterator[str]:
    now = {name: {value.number: value.name for value in each.value} for name, each in _all_enums(present)}
    for name, each in _all_enums(former):
        for value in each.value:
            if now.get(name, {}).get(value.number) != value.name:
                yield f"{name}.{value.name} = {value.number} is gone, or another"


def _calls(former: FileDescriptorSet, present: FileDescriptorSet) -> Iterator[str]:
    def calls(files: FileDescriptorSet) -> dict[str, tuple[object, ...]]:
        return {
            f"{file.package}.{service.name}.{call.name}": (
                call.input_type,
                call.output_type,
                call.client_streaming,
                call.server_streaming,
            )
            for file in files.file
            for service in file.service
            for call in service.method
        }

    now = calls(present)
    for name, was in calls(former).items():
        if now.get(name) != was:
            yield f"{name} was {was}, is {now.get(name)}"


def _all_messages(files: FileDescriptorSet) -> Iterator[tuple[str, DescriptorProto]]:
    def within(path: str, messages: list[DescriptorProto]) -> Iterator[tuple[str, DescriptorProto]]:
        for each in messages:
            yield f"{path}.{each.name}", each
            yield from within(f"{path}.{each.name}", list(each.nested_type))

    for file in files.file:
        yield from within(file.package, list(file.message_type))


def _all_enums(files: FileDescriptorSet) -> Iterator[tuple[str, EnumDescriptorProto]]:
    for file in files.file:
        for each in file.enum_type:
            yield f"{file.package}.{each.name}", each
    for name, message in _all_messages(files):
        for each in message.enum_type:
            yield f"{name}.{each.name}", each
