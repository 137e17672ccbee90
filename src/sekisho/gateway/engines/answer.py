"""Token ids of an engine to the text that a client gets, as our own nodes would release it.

The engine's own text is not used: it comes in pieces that differ by setting (whole so far, or new),
and its stop strings are cut by rules of its own. Text, stop strings, pieces of log-probabilities
and the count of tokens are ours.
"""

from collections.abc import Sequence

from sekisho.engine.output import Delta
from sekisho.engine.params import SamplingParams, TokenInfo
from sekisho.engine.tokenizer import Detokenizer, Tokenizer


class Answer:
    """The answer to one request.

    Attributes:
        count: tokens taken, an end-of-sequence token included.
        end: ``stop`` or ``length`` once the answer is complete, by our own reading of the tokens.
        cut: it is complete because of a stop string, which the engine may find later than we.
    """

    def __init__(self, request: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.count = 0
        self.end = ""
        self._request = request
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, params.stop)

    @property
    def cut(self) -> bool:
        return self._detokenizer.stopped

    def take(self, tokens: Sequence[int], infos: Sequence[TokenInfo]) -> Delta:
        """What these next tokens let out. ``infos``: one a token, or none. Tokens after the end are
        dropped."""
        delta = Delta(self._request, self.count, [], "", [])
        text = ""
        for position, token in enumerate(tokens):
            if self.end:
                break
            self.count += 1
            if token in self._params.stop_token_ids:
                text += self._detokenizer.flush()
                self.end = "stop"
                break
            text += self._detokenizer.push(token)
            delta.tokens.append(token)
            delta.infos.extend(infos[position : position + 1])
            if self._detokenizer.stopped:
                self.end = "stop"
            elif self.count == self._params.max_tokens:
                text += self._detokenizer.flush()
                self.end = "stop" if self._detokenizer.stopped else "length"
        return Delta(self._request, delta.index, delta.tokens, text, delta.infos)

    def close(self, code: str) -> Delta:
        """The engine ended here, for a reason that the tokens do not show: what was held back."""
        text = self._detokenizer.flush()
        self.end = "stop" if self._detokenizer.stopped else code
        return Delta(self._request, self.count, [], text, [])
