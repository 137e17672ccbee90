"""May a request begin? Looked at before anything is reserved for it or its parameters followed.

Every request names its tenant's salt. On decode, one that asks for a transfer also brings prefill's
signed manifest, which must be of the tokens that decode itself was sent.
"""

import json
from collections import OrderedDict
from typing import Any

from sekisho.guard.keeper import Keeper
from sekisho.guard.vllm.kind import Kind, ParamsError
from sekisho.guard.vllm.manifest import FIELD, Manifest, ManifestError, open_manifest
from sekisho.guard.vllm.rows import Holder, Rows

_USED_MAX = 1 << 16


class Refused(Exception):  # noqa: N818  # an answer, not an error of ours
    """A request may not begin. ``kind`` is a stable word for the metric."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Admission:
    """Of one scheduler process; the arguments are those of `scheduler.Scheduling`."""

    def __init__(self, keeper: Keeper, rows: Rows, role: str, key: bytes, kind: Kind) -> None:
        self._keeper = keeper
        self._rows = rows
        self._role = role
        self._key = key
        self._kind = kind
        self._used: OrderedDict[str, None] = OrderedDict()

    def check(self, request: Any) -> Manifest | None:
        """What prefill states of ``request``, where it is decode's and asks for a transfer.

        Raises:
            Refused: it may not begin.
        """
        if not request.cache_salt:
            raise Refused("salt", "no cache_salt: every request must name its tenant's")
        if request.mm_features or request.prompt_embeds is not None:
            raise Refused("input", "images, audio and embeddings are not followed")
        if request.resumable:
            raise Refused("input", "streamed input is not followed")
        params = request.kv_transfer_params or {}
        wanted, foreign = "do_remote_decode", "do_remote_prefill"
        if self._role == "decode":
            wanted, foreign = foreign, wanted
        if params.get(foreign):
            raise Refused("role", f"{foreign} was asked of a {self._role} server")
        if not params.get(wanted):
            return None
        transfer = self._transfer(request, params)
        if transfer is None:
            return None
        if transfer in self._used:
            raise Refused("transfer", "this transfer was asked for before")
        manifest = self._manifest(request, params) if self._role == "decode" else None
        self._used[transfer] = None
        while len(self._used) > _USED_MAX:
            self._used.popitem(last=False)
        return manifest

    def _transfer(self, request: Any, params: dict[str, Any]) -> str | None:
        blocks = self._keeper.layout.pages_for(len(request.prompt_token_ids))
        try:
            return self._kind.transfer(self._role, params, blocks)
        except ParamsError as error:
            raise Refused("manifest", str(error)) from error

    def _manifest(self, request: Any, params: dict[str, Any]) -> Manifest:
        """What prefill states, where it is what this request's own prompt implies."""
        try:
            manifest = open_manifest(self._key, params.get(FIELD))
        except ManifestError as error:
            raise Refused("manifest", str(error)) from error
        stated = manifest.transfer, manifest.engine
        if stated != (self._transfer(request, params), params["remote_engine_id"]):
            raise Refused("manifest", "the manifest is of another transfer")
        layout, length = self._keeper.layout, len(request.prompt_token_ids)
        if manifest.layout != layout.fingerprint:
            raise Refused("layout", "prefill has another model or another shape of blocks")
        if (manifest.tokens, manifest.blocks) != (length, layout.pages_for(length)):
            counts = f"prefill computed {manifest.tokens} tokens in {manifest.blocks} blocks"
            raise Refused("length", f"{counts}, the prompt has {length}")
        if manifest.digest != self.digest(request, length):
            raise Refused("text", "prefill computed another prompt, or for another tenant")
        return manifest

    def digest(self, request: Any, length: int) -> str:
        """Over scope, model and the first ``length`` tokens."""
        holding = self._keeper.open(request.request_id, scope_of(request))
        holder = Holder(request, holding, scope_of(request))
        last = (length - 1) // self._keeper.layout.page_size
        digest = self._rows.parts(holder, last, length)[3][-1]
        self._keeper.close(holding)
        return digest.hex()


def scope_of(request: Any) -> str:
    """Who may share blocks with ``request``: its salt, and the adapter that changes its KV."""
    lora = request.lora_request
    return json.dumps([request.cache_salt, None if lora is None else lora.lora_name])
