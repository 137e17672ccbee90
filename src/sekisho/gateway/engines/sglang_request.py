"""What SGLang is asked: our sampling parameters as a body of ``/generate``.

Every parameter is sent, so that no default of a server or of its model folder joins in.
"""

from typing import Any

from sekisho.engine.params import SamplingParams
from sekisho.gateway.errors import bad_request

_PENALTY_MAX = 2.0
_SEED_MASK = (1 << 63) - 1


def check(params: SamplingParams) -> None:
    """Refuse what SGLang cannot do (``SamplingParams.verify`` in its ``sampling_params.py``).

    Raises:
        ApiError: 400 that names the field.
    """
    if params.repetition_penalty > _PENALTY_MAX:
        message = f"repetition_penalty: must be at most {_PENALTY_MAX:g} with this engine"
        raise bad_request("invalid_value", message, "repetition_penalty")


def body(tokens: list[int], params: SamplingParams, rid: str, scope_key: str) -> dict[str, Any]:
    """The part of the body that knows nothing of the pair. ``scope_key`` separates the radix cache
    of this tenant from all others (``extra_key`` in ``RadixKey``)."""
    told: dict[str, Any] = {
        "rid": rid,
        "input_ids": tokens,
        "sampling_params": _sampling(params),
        "extra_key": scope_key,
        "stream": True,
    }
    if params.logprobs is not None:
        told["return_logprob"] = True
        told["top_logprobs_num"] = params.logprobs
    return told


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        # It takes a signed number, and uses it under --enable-deterministic-inference only.
        "sampling_seed": params.seed & _SEED_MASK,
        "skip_special_tokens": True,
    }
