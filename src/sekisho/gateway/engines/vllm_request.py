"""What vLLM is asked: our sampling parameters as bodies of ``/v1/completions``.

Every parameter is sent, so that no default of a server or of its model folder joins in; but no
name of a model, which stands for the one that the server was started with.
(``CompletionRequest`` in vLLM 0.32.0, ``vllm/entrypoints/openai/completion/protocol.py``.)
"""

from typing import Any

from sekisho.engine.params import SamplingParams

_SEED_MASK = (1 << 63) - 1


def first(tokens: list[int], scope_key: str, transfer: str) -> dict[str, Any]:
    """What prefill is asked: one token, whose value nobody will see.

    It must end by its length, or vLLM keeps the blocks to itself: no token may be one that ends.
    """
    return {
        "prompt": tokens,
        "cache_salt": scope_key,
        "max_tokens": 1,
        "min_tokens": 1,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer,
        },
    }


def second(
    tokens: list[int],
    params: SamplingParams,
    scope_key: str,
    transfer_params: dict[str, Any],
) -> dict[str, Any]:
    """What decode is asked. ``scope_key`` separates the prefix cache of this tenant from all
    others. The prompt comes back with the first event, and every token as its id."""
    told: dict[str, Any] = {
        "prompt": tokens,
        "cache_salt": scope_key,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "kv_transfer_params": transfer_params,
        **_sampling(params),
    }
    if params.logprobs is not None:
        told["logprobs"] = params.logprobs
        told["return_tokens_as_token_ids"] = True
    return told


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": params.max_tokens,
        "min_tokens": 0,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,  # the ids above are all that end an answer
        "seed": params.seed & _SEED_MASK,
        "skip_special_tokens": True,
    }
