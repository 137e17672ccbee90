"""Admission, on both roles: judged on the original length against the smallest limit of both.

A request that carries a rejection, in whatever field, goes no further: it is not queued, nothing
is reserved for it, nothing is sent. In the incident of 2026 the verdict was in ``to_finish``, the
queue asked ``finished()``, and the prompt had become a placeholder of one token.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sekisho.guard.seams import Seam
from sekisho.guard.sglang.decode import Decode
from sekisho.guard.sglang.prefill import Prefill
from sekisho.guard.sglang.state import State, active

log = logging.getLogger("sekisho.guard")
Original = Callable[..., Any]

PATH = "/sekisho"
"""Route of prefill's bootstrap server: PUT by its scheduler, GET by decode. JSON: limit, guard."""
_ASK_S = 2.0
_FRESH_S, _FRESH_NONE_S = 5.0, 3.0
_CLIP = 4096  # SGLang counts no more than so many new tokens of a request beforehand
_limits: dict[str, tuple[float, int | None]] = {}


def limit_of(scheduler: Any, role: str) -> int:
    """Longest prompt in tokens that this scheduler can ever take.

    Prefill schedules a prompt only if it, one more token and one page are below the pool
    (`PrefillAdder.add_one_req`); decode keeps ``num_reserved_decode_tokens`` beside it
    (`DecodePreallocQueue.pop_preallocated`). What is longer would wait for ever.
    """
    pool, page = scheduler.max_total_num_tokens, scheduler.page_size
    if role == "prefill":
        return int(min(scheduler.max_req_input_len - 1, pool - page - 2))
    reserved = scheduler.disagg_decode_prealloc_queue.num_reserved_decode_tokens
    return int(min(scheduler.max_req_input_len - 1, pool - reserved))


def publish(state: State, host: str, port: int) -> None:
    """Prefill's scheduler tells its bootstrap server, which decode asks, of its limit.

    Raises:
        OSError: the bootstrap server does not answer.
    """
    import requests

    body = {"limit": state.limit, "guard": True}
    reply = requests.put(f"http://{host}:{port}{PATH}", json=body, timeout=_ASK_S)
    reply.raise_for_status()


def limit_at(address: str) -> int | None:
    """Limit of the prefill server whose bootstrap server is at ``address``; None if it says none,
    as one without the guard does."""
    asked, limit = _limits.get(address, (-math.inf, None))
    age = time.monotonic() - asked
    if age < (_FRESH_NONE_S if limit is None else _FRESH_S):
        return limit
    if limit is None:
        return _ask_limit(address)
    # A number is good while it is asked for again: the scheduler does not wait.
    _limits[address] = (time.monotonic(), limit)
    threading.Thread(target=_ask_limit, args=(address,), daemon=True).start()
    return limit


def _ask_limit(address: str) -> int | None:
    import requests

    try:
        said = requests.get(f"http://{address}{PATH}", timeout=_ASK_S).json()
        limit = said["limit"] if said.get("guard") is True else None
    except (requests.RequestException, ValueError, KeyError, AttributeError):
        limit = None
    limit = limit if isinstance(limit, int) else None
    _limits[address] = (time.monotonic(), limit)
    return limit


def _refusal(state: State, req: Any) -> tuple[str, str, int] | None:
    """Kind, message and status of a refusal; None to go on."""
    length = getattr(req, "sekisho_length", len(req.origin_input_ids))
    limit = state.limit
    if state.role == "decode" and not _fake(req):
        other = limit_at(f"{req.bootstrap_host}:{req.bootstrap_port}")
        if other is None:
            return "unguarded", "the prefill server has no active guard", 503
        limit = min(limit, other)
        if isinstance(state, Decode) and state.grants.lease_of(req.bootstrap_room):
            return "room", f"bootstrap_room {req.bootstrap_room} is in use", 400
    if length > limit:
        text = f"the prompt has {length} tokens, this deployment holds {limit} in every role"
        return "length", text, HTTPStatus.BAD_REQUEST
    answer = min(req.sampling_params.max_new_tokens or 0, _CLIP)
    pool = state.scheduler.max_total_num_tokens
    if state.role == "decode" and length + answer > pool:
        text = f"the prompt has {length} tokens and the answer {answer}, decode holds {pool}"
        return "length", text, HTTPStatus.BAD_REQUEST
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for verdict in (req.to_finish, req.finished_reason):
        if isinstance(verdict, FINISH_ABORT):
            return "verdict", verdict.message, verdict.status_code or HTTPStatus.BAD_REQUEST
    return None


def _fake(req: Any) -> bool:
    from sglang.srt.disaggregation.utils import _is_fake_transfer

    return bool(_is_fake_transfer(req))


def _set_finish_with_abort(original: Original, req: Any, *args: Any, **kwargs: Any) -> Any:
    if not hasattr(req, "sekisho_length"):
        req.sekisho_length = len(req.origin_input_ids)
    return original(req, *args, **kwargs)


def _add_request_to_queue(
    original: Original, scheduler: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    state = active()
    resumed = kwargs.get("is_retracted", args[0] if args else False)
    refusal = None if state is None or resumed else _refusal(state, req)
    if state is None or refusal is None:
        return original(scheduler, req, *args, **kwargs)
    from sglang.srt.disaggregation.utils import prepare_abort

    kind, message, status = refusal
    log.warning("sekisho: refused %s (%s): %s", req.rid, kind, message)
    state.report.refused(kind)
    prepare_abort(req, message, status_code=HTTPStatus(status))
    scheduler.output_streamer.stream_output([req], False)
    if isinstance(state, Prefill) and req.bootstrap_room is not None:
        manager = scheduler.disagg_prefill_bootstrap_queue.kv_manager
        state.refuse(manager, req.bootstrap_room, message)
    return None


def _setup_routes(original: Original, server: Any) -> Any:
    """In prefill's bootstrap server: one more route."""
    from aiohttp import web

    said: dict[str, Any] = {}

    async def put(request: web.Request) -> web.Response:
        said.update(await request.json())
        return web.json_response({})

    async def get(_: web.Request) -> web.Response:
        return web.json_response(said)

    out = original(server)
    server.app.router.add_put(PATH, put)
    server.app.router.add_get(PATH, get)
    return out


SEAMS = (
    Seam(
        "sglang.srt.managers.schedule_batch:Req.set_finish_with_abort",
        ("self", "error_msg"),
        _set_finish_with_abort,
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler._add_request_to_queue",
        ("self", "req", "is_retracted"),
        _add_request_to_queue,
    ),
    Seam(
        "sglang.srt.disaggregation.common.conn:CommonKVBootstrapServer._setup_routes",
        ("self",),
        _setup_routes,
    ),
)
