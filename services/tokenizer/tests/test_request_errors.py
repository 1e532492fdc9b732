"""What decoding says about a body, in sentences with the API's own names."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest
from msgspec import Meta

from shoal_contracts.errors import BadRequest
from shoal_tokenizer.codec.requests.request_errors import decoding_error


class Text(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class Image(msgspec.Struct, tag_field="type", tag="image"):
    is_refused: ClassVar[bool] = True


class User(msgspec.Struct, tag_field="role", tag="user", forbid_unknown_fields=True):
    content: str | Annotated[list[Text | Image], Meta(min_length=1)]


class Assistant(msgspec.Struct, tag_field="role", tag="assistant"):
    pass


class Body(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[User | Assistant] = []
    labels: Annotated[
        dict[Annotated[str, Meta(max_length=4)], Annotated[str, Meta(max_length=3)]], Meta(max_length=2)
    ] = {}
    choice: Literal["a", "b"] | Text | None = None
    count: Annotated[int, Meta(ge=1, le=5)] | None = None
    share: float | None = None
    name: Annotated[str, Meta(pattern="^a$")] | None = None
    modes: dict[str, Literal["on", "off"]] = {}


def error(body: bytes, **how: Any) -> BadRequest:
    with pytest.raises((msgspec.MsgspecError, RecursionError, UnicodeDecodeError)) as caught:
        msgspec.json.decode(body, type=Body)
    return decoding_error(caught.value, **how)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b'{"messages":[{"role":"x"}]}', "messages[0].role",
         "Invalid value: 'x'. Supported values are: 'user', 'assistant'."),
        (b'{"messages":[{}]}', "messages[0].role", "Missing required parameter: 'messages[0].role'."),
        (b'{"messages":[5]}', "messages[0]",
         "Invalid type for 'messages[0]': expected an object, but got an integer."),
        (b'{"messages":[{"role":"user","content":[{"type":"x"}]}]}', "messages[0].content[0].type",
         "Invalid value: 'x'. Supported values are: 'text'."),
        (b'{"messages":[{"role":"user","content":[]}]}', "messages[0].content",
         "Invalid 'messages[0].content': the number of entries must be >= 1."),
        (b'{"messages":[{"role":"user","content":"","zap":1}]}', "messages[0].zap",
         "Unrecognized request argument supplied: messages[0].zap"),
        (b'{"messages":[{"role":"user","content":5}]}', "messages[0].content",
         "Invalid type for 'messages[0].content': expected a string or an array, but got an integer."),
        (b'{"labels":{"abcde":"x"}}', "labels", "A key of 'labels' is not taken: expected str of length <= 4."),
        (b'{"labels":{"a":"xxxx"}}', "labels", "Invalid 'labels': the length must be <= 3."),
        (b'{"labels":{"a":"","b":"","c":""}}', "labels", "Invalid 'labels': the number of entries must be <= 2."),
        (b'{"choice":"c"}', "choice", "Invalid value: 'c'. Supported values are: 'a', 'b'."),
        (b'{"choice":{"type":"c"}}', "choice.type", "Invalid value: 'c'. Supported values are: 'text'."),
        (b'{"choice":5}', "choice",
         "Invalid type for 'choice': expected a string or an object or null, but got an integer."),
        (b'{"count":9}', "count", "Invalid 'count': the value must be <= 5."),
        (b'{"count":1.5}', "count", "Invalid type for 'count': expected an integer or null, but got a number."),
        (b'{"share":1e999}', "share", "Invalid 'share': number out of range."),
        (b'{"name":"b"}', "name", "Invalid 'name': the value must match ^a$."),
        (b'{"modes":{"x":"dim"}}', "modes", "Invalid value: 'dim'. Supported values are: 'off', 'on'."),
        (b"[]", None, "Invalid type of the body: expected an object, but got an array."),
    ],
)  # fmt: skip
def test_errors_name_the_place_and_what_it_takes(body: bytes, param: str | None, message: str) -> None:
    told = error(body, structure=Body)
    assert (told.param, told.message) == (param, message)


@pytest.mark.parametrize("body", [b"", b"{", b'{"name":NaN}', b"\xff", b'{"name":"\xff"}', b'{"name":"\\ud800"}'])
def test_what_is_no_json(body: bytes) -> None:
    told = error(body, structure=Body)
    assert told.param is None and told.message.startswith("We could not parse the JSON body of your request: ")


def test_depth_has_its_own_words() -> None:
    deep = b"[" * 100_000
    with pytest.raises(RecursionError) as caught:
        msgspec.json.decode(deep)
    assert decoding_error(caught.value).message == "The body is nested too deeply."


def test_without_the_structure_roles_are_told_as_given() -> None:
    told = error(b'{"messages":[{"role":"x"}]}', roles=("user",))
    assert told.message == "Invalid value: 'x'. Supported values are: 'user'."
    assert error(b'{"choice":"c"}', roles=("user",)).message == "Invalid value: 'c'."


def test_what_a_caller_spelled_is_shown_in_part() -> None:
    told = error(b'{"' + b"z" * 1000 + b'":1}', structure=Body)
    assert told.param == "z" * 64 and len(told.message) < 120
    assert len(error(b'{"choice":"' + b"c" * 1000 + b'"}', structure=Body).message) < 150
