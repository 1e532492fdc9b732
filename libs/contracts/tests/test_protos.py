"""The protos keep the conventions that common.proto states, and their comments say what a caller must know."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from shoal_contracts.v1 import common_pb2, decode_pb2, fleet_pb2, gateway_pb2, kvindex_pb2, prefill_pb2, tokenizer_pb2

FOLDER = Path(__file__).parents[1] / "proto/shoal_contracts/v1"
PROTOS = sorted(FOLDER.glob("*.proto"))
MODULES = [common_pb2, decode_pb2, fleet_pb2, gateway_pb2, kvindex_pb2, prefill_pb2, tokenizer_pb2]
MESSAGES = [message for module in MODULES for message in module.DESCRIPTOR.message_types_by_name.values()]
FIELDS = [field for message in MESSAGES for field in message.fields]
SERVICES = [service for module in MODULES for service in module.DESCRIPTOR.services_by_name.values()]

# Numbers whose unit is the thing itself.
COUNTS_AND_NUMBERS = {
    *("stream_id", "top_k", "seed", "logprobs", "incarnation", "delivery", "blocks"),
    *("stop_token_id", "stop_token_ids", "first_token", "logit_bias"),
    *("object_group_id", "kv_rank", "seq", "http_port", "first_other_block", "prior_events"),
}
UNITS = ("_ms", "_s", "_tokens", "_blocks", "_bytes", "_requests", "_objects")


def comment_above(lines: list[str], line: int) -> str:
    start = line
    while start > 0 and lines[start - 1].strip().startswith("//"):
        start -= 1
    return "\n".join(lines[start:line])


def test_every_proto_is_tested():
    assert [path.name for path in PROTOS] == [Path(module.DESCRIPTOR.name).name for module in MODULES]


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_file_says_what_it_is_for(path):
    assert path.read_text().startswith("// ")


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_unary_method_names_its_errors_and_every_stream_its_rules(path):
    lines = path.read_text().splitlines()
    codes = set(common_pb2.ErrorCode.keys())
    for number, line in enumerate(lines):
        if not (method := re.match(r"  rpc (\w+)\((stream )?", line)):
            continue
        comment = comment_above(lines, number)
        assert comment, f"{path.name}: {method[1]} has no comment"
        if method[2]:  # failures of a bidirectional stream are fields of its messages
            continue
        assert "errors" in comment.lower(), f"{path.name}: {method[1]} does not say its errors"
        named = set(re.findall(r"\b[A-Z_]{3,}\b", comment.partition("Errors:")[2]))
        assert named <= codes, f"{path.name}: {method[1]} names an unknown code"


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_error_codes_in_comments_exist(path):
    for codes in re.findall(r"// ([A-Z_]+(?:, [A-Z_]+)+)", path.read_text()):
        assert set(codes.split(", ")) <= set(common_pb2.ErrorCode.keys())


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.full_name)
def test_numbers_have_units_and_booleans_are_claims(field):
    whole_numbers = {
        *(
            FieldDescriptor.TYPE_UINT32,
            FieldDescriptor.TYPE_UINT64,
            FieldDescriptor.TYPE_INT32,
            FieldDescriptor.TYPE_INT64,
        ),
    }
    if field.type in whole_numbers and field.containing_type.GetOptions().map_entry is False:
        assert field.name.endswith(UNITS) or field.name in COUNTS_AND_NUMBERS or field.name == "max_tokens"
    if field.type == FieldDescriptor.TYPE_BOOL:
        assert field.name.startswith(("is_", "has_")) or field.name in {"stream", "ignore_eos", "stopped_early"}


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_messages_of_a_method_carry_its_name_or_are_shared_on_purpose(service):
    shared = {"EncodeRequest", "GenerateRequest"}
    for method in service.methods:
        assert method.input_type.name in {f"{method.name}Request", *shared}
        assert method.output_type.name == f"{method.name}Reply"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.full_name)
def test_an_unset_message_survives_the_wire(message):
    prototype = message._concrete_class
    assert prototype.FromString(prototype().SerializeToString()) == prototype()
