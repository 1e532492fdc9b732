"""One word per concept (docs/glossary.md): the sharp words stay out of the names that we choose.

Only names that our code defines are looked at: what a library calls its own things is its business.
"""

import ast
import re
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import FileDescriptorProto

from shoal_contracts.v1 import common_pb2, decode_pb2, fleet_pb2, kvindex_pb2, prefill_pb2, tokenizer_pb2

SHARP = {
    "chunk",
    "chunks",
    "ttl",
    "pod",
    "pods",
    "uncached",
    "manager",
    "managers",
    "util",
    "utils",
    "helper",
    "helpers",
}
BANNED_IN_FILES_AND_CLASSES = {
    *("manager", "helper", "helpers", "util", "utils", "common", "misc", "data", "info", "new", "v2"),
}

# word -> the places that speak somebody else's language, where it is that language's word.
ALLOWED = {
    "chunk": (
        "services/kvindex/src/shoal_kvindex/coordinator_api.py",  # LMCache's protocol
        "libs/engine/src/shoal_engine/vllm/lmcache.py",  # LMCache's settings
        "services/tokenizer/src/shoal_tokenizer/codec/",  # OpenAI's event names
    ),
    "manager": ("libs/kvstore/src/shoal_kvstore/level_policy.py",),  # LMCache's listener
    "ttl": ("libs/runtime/src/shoal_runtime/nats.py",),  # JetStream's settings
}


def words(name: str) -> set[str]:
    """``PrefillJob`` and ``prefill_job`` are both prefill, job."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|v\d+", name)} | set(
        name.lower().split("_")
    )


def defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr
            case ast.alias(asname=str() as name):
                yield name


def sharp_names(file: str, source: str) -> Iterator[str]:
    for name in sorted(set(defined_names(ast.parse(source)))):
        for word in sorted(words(name) & SHARP):
            if not file.startswith(ALLOWED.get(word.removesuffix("s"), ())):
                yield f"{file}: {name}"


def banned_names(file: str, source: str) -> Iterator[str]:
    stem = file.rsplit("/", 1)[-1].removesuffix(".py")
    classes = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    yield from (f"{file}: {name}" for name in [stem, *classes] if words(name) & BANNED_IN_FILES_AND_CLASSES)


def test_sharp_words_stay_out_of_our_names(repository):
    found = [name for path in repository.shipped() for name in sharp_names(repository.name(path), path.read_text())]
    assert found == []


def test_files_and_classes_say_what_they_are(repository):
    found = [name for path in repository.shipped() for name in banned_names(repository.name(path), path.read_text())]
    assert found == []


def test_sharp_words_stay_out_of_the_wire():
    found = []
    for module in (common_pb2, decode_pb2, fleet_pb2, kvindex_pb2, prefill_pb2, tokenizer_pb2):
        file = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        names = [message.name for message in file.message_type] + [enum.name for enum in file.enum_type]
        names += [field.name for message in file.message_type for field in message.field]
        found += [f"{file.name}: {name}" for name in names if words(name) & SHARP]
    assert found == []


def test_sharp_names_are_seen():
    source = "import x as utils\nclass PodManager:\n  def f(self, chunk_size):\n    self.ttl_s = chunk_size\n"
    assert list(sharp_names("a.py", source)) == [
        *("a.py: PodManager", "a.py: PodManager", "a.py: chunk_size", "a.py: ttl_s", "a.py: utils"),
    ]
    assert list(banned_names("libs/x/new_common.py", source)) == [
        "libs/x/new_common.py: new_common",
        "libs/x/new_common.py: PodManager",
    ]
    assert list(sharp_names("services/kvindex/src/shoal_kvindex/coordinator_api.py", "chunk_hash = 1")) == []
