"""A released wire format only grows: nothing that was released may be removed, renumbered or retyped.

``libs/contracts/proto/released.binpb`` is the descriptor set of the last release; libs/contracts/README.md
says how it is made.
"""

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from shoal_contracts.v1 import common_pb2, decode_pb2, fleet_pb2, gateway_pb2, kvindex_pb2, prefill_pb2, tokenizer_pb2

RELEASED = Path(__file__).parents[2] / "libs/contracts/proto/released.binpb"
MODULES = (common_pb2, decode_pb2, fleet_pb2, gateway_pb2, kvindex_pb2, prefill_pb2, tokenizer_pb2)


def current() -> FileDescriptorSet:
    return FileDescriptorSet(
        file=[FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb) for module in MODULES]
    )


def broken_fields(old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    def shape(field: FieldDescriptorProto) -> tuple[object, ...]:
        return (
            field.name,
            field.type,
            field.label,
            field.type_name,
            field.proto3_optional,
            field.HasField("oneof_index"),
        )

    fields = {field.number: shape(field) for field in new.field}
    yield from (f"{old.name}.{field.name}" for field in old.field if fields.get(field.number) != shape(field))


def broken_values(old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    values = {value.number: value.name for value in new.value}
    yield from (f"{old.name}.{value.name}" for value in old.value if values.get(value.number) != value.name)


def broken_methods(old: ServiceDescriptorProto, new: ServiceDescriptorProto) -> Iterator[str]:
    methods = {method.name: method.SerializeToString() for method in new.method}
    yield from (
        f"{old.name}.{method.name}" for method in old.method if methods.get(method.name) != method.SerializeToString()
    )


def broken(released: FileDescriptorSet, now: FileDescriptorSet) -> list[str]:
    """Names of everything in ``released`` that ``now`` no longer honours."""
    found: list[str] = []
    for attribute, compare in (
        ("message_type", broken_fields),
        ("enum_type", broken_values),
        ("service", broken_methods),
    ):
        here = {element.name: element for file in now.file for element in getattr(file, attribute)}
        for element in (element for file in released.file for element in getattr(file, attribute)):
            found += compare(element, here[element.name]) if element.name in here else [element.name]
    return found


def test_nothing_that_was_released_is_gone_or_changed():
    assert broken(FileDescriptorSet.FromString(RELEASED.read_bytes()), current()) == []


def test_removed_and_retyped_parts_are_seen():
    changed = current()
    messages = {message.name: message for file in changed.file for message in file.message_type}
    del messages["Failure"].field[1]
    messages["Item"].field[0].type = FieldDescriptorProto.TYPE_INT64
    messages["Beat"].field[1].name = "epoch"
    for file in changed.file:
        if file.name.endswith("kvindex.proto"):
            file.message_type.remove(messages["LevelHit"])
            file.service[0].method[0].server_streaming = True
        if file.name.endswith("common.proto"):
            del file.enum_type[0].value[3]
    assert broken(current(), changed) == [
        "Failure.message",
        "Item.offset_tokens",
        "Beat.incarnation",
        "LevelHit",
        "ErrorCode.CONTEXT_LENGTH_EXCEEDED",
        "KvIndex.Match",
    ]


def test_what_is_added_is_welcome():
    grown = current()
    grown.file[0].message_type.add(name="Later")
    grown.file[0].message_type[0].field.add(name="later", number=99)
    assert broken(current(), grown) == []
