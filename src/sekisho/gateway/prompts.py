"""From a checked body to backend requests: tokens, length, sampling parameters.

Runs outside the event loop: a long prompt takes long to tokenise.
"""

import hashlib
import secrets
from dataclasses import dataclass

from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import TemplateError
from sekisho.gateway.errors import bad_request
from sekisho.gateway.model import ServedModel
from sekisho.gateway.schemas import ChatRequest, CompletionRequest, Prompt, Sampling

# Below it, logits divided by the temperature overflow; the distribution is greedy long before.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Call:
    """One backend request. ``prompt`` and ``sample`` say which prompt of the body, and which of
    its ``n`` answers; the choice index of the API is ``prompt * n + sample``."""

    prompt: int
    sample: int
    tokens: list[int]
    params: SamplingParams


def chat_calls(request: ChatRequest, model: ServedModel, tokens_max: int) -> list[Call]:
    """The ``n`` calls of a conversation.

    Raises:
        ApiError: 400 for a template that refuses it, or a length above ``tokens_max``.
    """
    if not model.tokenizer.has_chat_template:
        raise bad_request("unsupported_model", "this model has no chat template", "model")
    turns = [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content,
        }
        for message in request.messages
    ]
    try:
        tokens = model.tokenizer.encode_chat(turns)
    except TemplateError as error:
        message = f"messages: the chat template refuses them: {str(error)[:200]}"
        raise bad_request("invalid_value", message, "messages") from None
    top = (request.top_logprobs or 0) if request.logprobs else None
    wanted = request.max_completion_tokens or request.max_tokens
    return _calls(request, [tokens], "messages", wanted, top, model, tokens_max)


def completion_calls(request: CompletionRequest, model: ServedModel, tokens_max: int) -> list[Call]:
    """The calls of one or several prompts, ``n`` each.

    Raises:
        ApiError: 400 for a token id outside the vocabulary, or a length above ``tokens_max``.
    """
    prompts = [_prompt_tokens(prompt, model) for prompt in request.prompt]
    wanted = request.max_tokens
    return _calls(request, prompts, "prompt", wanted, request.logprobs, model, tokens_max)


def _prompt_tokens(prompt: Prompt, model: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt)
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        message = f"prompt: token ids must be from 0 to {model.vocab_size - 1}"
        raise bad_request("invalid_value", message, "prompt")
    return list(prompt)


def _calls(
    request: Sampling,
    prompts: list[list[int]],
    field: str,
    wanted: int | None,
    logprobs: int | None,
    model: ServedModel,
    tokens_max: int,
) -> list[Call]:
    for token in request.logit_bias:
        if token >= model.vocab_size:
            message = f"logit_bias: token ids must be from 0 to {model.vocab_size - 1}"
            raise bad_request("invalid_value", message, "logit_bias")
    rooms = [_answer_tokens(len(tokens), field, wanted, tokens_max) for tokens in prompts]
    return [
        Call(
            prompt,
            sample,
            tokens,
            _params(request, room, _seed(request.seed, sample), logprobs, model),
        )
        for prompt, (tokens, room) in enumerate(zip(prompts, rooms, strict=True))
        for sample in range(request.n or 1)
    ]


def _answer_tokens(prompt_tokens: int, field: str, wanted: int | None, tokens_max: int) -> int:
    """How many tokens the answer may have; what the client asks for is refused, never cut."""
    if prompt_tokens == 0:
        raise bad_request("invalid_value", f"{field}: is empty", field)
    if prompt_tokens + (wanted or 1) > tokens_max:
        answer = "at least 1 token" if wanted is None else f"up to {wanted} tokens"
        message = (
            f"this model's maximum context length is {tokens_max} tokens; {field} has "
            f"{prompt_tokens} tokens, and the answer needs {answer}"
        )
        raise bad_request("context_length_exceeded", message, field)
    return wanted or tokens_max - prompt_tokens


def _seed(given: int | None, sample: int) -> int:
    """Sample 0 uses the client's seed itself, so that ``n`` does not change the first answer."""
    if given is None:
        return secrets.randbits(64)
    if sample == 0:
        return given
    data = given.to_bytes(8, "little") + sample.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=8, person=b"sekisho-sample").digest()
    return int.from_bytes(digest, "little")


def _params(
    request: Sampling, max_tokens: int, seed: int, logprobs: int | None, model: ServedModel
) -> SamplingParams:
    temperature = 1.0 if request.temperature is None else request.temperature
    penalty = request.repetition_penalty
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
        min_p=request.min_p or 0.0,
        seed=seed,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if penalty is None else penalty,
        logit_bias=request.logit_bias,
        logprobs=logprobs,
        stop=request.stop,
        stop_token_ids=tuple(model.eos_token_ids),
    )
