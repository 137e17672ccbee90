"""What the two generating endpoints accept.

Every field of the OpenAI API that clients commonly send is named here: served, or accepted
only with a value that changes nothing, or refused. A field that is not here is refused too, so
that no wish of a client is dropped in silence. Types are strict: "1" is not 1, true is not 1.
"""

from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from sekisho.gateway.body import decode_body
from sekisho.gateway.errors import ApiError, bad_request, clip

STOP_MAX = 4
STOP_LENGTH_MAX = 1024  # characters
PROMPTS_MAX = 128

Prompt = str | tuple[int, ...]


def _only(*harmless: object) -> BeforeValidator:
    """Accept null and the values ``harmless``, which ask for what the server does anyway."""

    def refuse_others(value: object) -> None:
        same = (type(value) is type(each) and value == each for each in harmless)
        if value is not None and not any(same):
            raise PydanticCustomError("unsupported_parameter", "is not supported by this server")

    return BeforeValidator(refuse_others)


def _invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", "{text}", {"text": message})


def _stop(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if value is None:
        return ()
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
        raise _invalid("must be a string or a list of strings")
    if len(strings) > STOP_MAX:
        raise _invalid(f"must have at most {STOP_MAX} strings, not {len(strings)}")
    if not all(0 < len(each) <= STOP_LENGTH_MAX for each in strings):
        raise _invalid(f"each string must have 1 to {STOP_LENGTH_MAX} characters")
    return tuple(strings)


def _logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid("must be an object of token ids and numbers")
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key):
            raise _invalid(f"the key {clip(key)} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise _invalid(f"the bias of token {key} must be a number from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


def _content(value: object) -> str:
    """Text of a message; text parts are joined by newlines, as vLLM joins them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _invalid("must be a string or a list of text parts, not empty")
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise _invalid(f"part {index} must be an object")
        if part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise PydanticCustomError(
                "unsupported_parameter",
                "part {index} is not supported: only parts of type text are",
                {"index": index},
            )
        if not isinstance(part["text"], str):
            raise _invalid(f"the text of part {index} must be a string")
    return "\n".join(part["text"] for part in value)


def _prompts(value: object) -> tuple[Prompt, ...]:
    if isinstance(value, list) and value and not all(type(each) is int for each in value):
        if len(value) > PROMPTS_MAX:
            raise _invalid(f"must have at most {PROMPTS_MAX} prompts, not {len(value)}")
        return tuple(_prompt(each) for each in value)
    return (_prompt(value),)


def _prompt(value: object) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return tuple(value)
    raise _invalid("must be text or token ids, or a list of such, and nothing of it empty")


def _of_field(field: str, message: str) -> PydanticCustomError:
    """For checks of several fields together, whose location pydantic cannot know."""
    return PydanticCustomError("invalid_value", "{text}", {"text": message, "field": field})


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    """``stream_options``: whether a last chunk tells the usage."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[None, _only(False)] = None


class Sampling(_Strict):
    """Fields that both endpoints share. Null means the default, as with OpenAI."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    # So that no logit overflows: the engine multiplies and divides by it.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias)] = {}
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    n: Annotated[int, Field(ge=1, le=8)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Accepted, read by nothing, a key for nothing.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None

    service_tier: Annotated[None, _only("auto", "default")] = None
    store: Annotated[None, _only(False)] = None
    cache_salt: Annotated[None, _only()] = None
    prompt_cache_key: Annotated[None, _only()] = None
    response_format: Annotated[None, _only({"type": "text"})] = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _of_field("stream_options", "is allowed only with stream: true")
        return self


class Message(_Strict):
    """One turn. ``developer`` is the newer word for ``system`` and reaches the template as it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_content)]

    # What the official client's own answer objects carry when they are sent back.
    name: Annotated[None, _only()] = None
    refusal: Annotated[None, _only()] = None
    audio: Annotated[None, _only()] = None
    annotations: Annotated[None, _only([])] = None
    function_call: Annotated[None, _only()] = None
    tool_calls: Annotated[None, _only([])] = None


class ChatRequest(Sampling):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    tools: Annotated[None, _only([])] = None
    tool_choice: Annotated[None, _only("none", "auto")] = None
    parallel_tool_calls: Annotated[None, _only(True, False)] = None
    functions: Annotated[None, _only([])] = None
    function_call: Annotated[None, _only("none", "auto")] = None
    modalities: Annotated[None, _only(["text"])] = None
    audio: Annotated[None, _only()] = None
    prediction: Annotated[None, _only()] = None
    reasoning_effort: Annotated[None, _only()] = None
    verbosity: Annotated[None, _only()] = None
    web_search_options: Annotated[None, _only()] = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise _of_field("max_tokens", "is the older name of max_completion_tokens: send one")
        if self.top_logprobs is not None and not self.logprobs:
            raise _of_field("top_logprobs", "is allowed only with logprobs: true")
        return self


class CompletionRequest(Sampling):
    """Body of ``/v1/completions``; ``prompt`` is text or token ids, one or several."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    best_of: Annotated[None, _only(1)] = None
    echo: Annotated[None, _only(False)] = None
    suffix: Annotated[None, _only("")] = None

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if len(self.prompt) * (self.n or 1) > PROMPTS_MAX:
            raise _of_field("n", f"asks, with the prompts, for more than {PROMPTS_MAX} answers")
        return self


Body = TypeVar("Body", bound=Sampling)

_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
}


def parse(kind: type[Body], body: bytes) -> Body:
    """The body of a request as ``kind``.

    Raises:
        ApiError: 400 that names the first field at fault, and its limit where there is one.
    """
    try:
        return kind.model_validate(decode_body(body))
    except ValidationError as error:
        raise _named(error.errors(include_url=False, include_input=False)[0]) from None


def _named(detail: ErrorDetails) -> ApiError:
    """pydantic's finding as an error of the API; it never quotes the value."""
    param = str(detail.get("ctx", {}).get("field", ""))
    for part in detail["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        else:
            param += f".{clip(part)}" if param else clip(part)
    what = "is not a known field" if detail["type"] == "extra_forbidden" else detail["msg"]
    return bad_request(_CODES.get(detail["type"], "invalid_value"), f"{param}: {what}", param)
