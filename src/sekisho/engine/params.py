"""Sampling parameters of one request, as they travel between gateway and nodes."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Already validated (the gateway names the field of a bad value to the client).

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 means greedy.
        top_p: in (0, 1]. top_k: 0 means all. min_p: in [0, 1].
        seed: u64; the gateway draws one where the client gave none.
        presence_penalty, frequency_penalty: in [-2, 2], over generated tokens (OpenAI).
        repetition_penalty: above 0, over prompt and generated tokens (CTRL paper, HF, vLLM).
        logit_bias: token id to bias in [-100, 100].
        logprobs: None, or how many top alternatives (0 to 20) to report with each token.
        stop: up to 4 stop strings; the answer ends before the first of them.
        stop_token_ids: ids that end the answer (the model's end-of-sequence ids).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token id, its text piece as bytes, and its log-probability (natural log)."""

    token: int
    piece: bytes
    logprob: float


class TokenInfo(msgspec.Struct, frozen=True):
    """Log-probability of one emitted token and of its best alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
