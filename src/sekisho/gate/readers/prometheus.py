"""Prometheus text, from an engine or a file, of which only the wanted series are parsed.

An engine's whole ``/metrics`` takes the parser 20 ms; 200 engines would be 4 s.
"""

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sekisho.gate.model import ReadError

_SAMPLES_MAX = 4096  # engines of one deployment that one exporter can plausibly speak for


def samples(body: bytes, *names: str) -> Iterator[Sample]:
    """The samples of the metrics ``names``.

    Raises:
        ReadError: not UTF-8, HTML, cut off within a line, or a line that is no sample.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise ReadError("/metrics: the text is not UTF-8") from None
    if text.lstrip()[:1] in ("<", "{"):
        raise ReadError("/metrics: the answer is no Prometheus text")
    if text and not text.endswith("\n"):
        raise ReadError("/metrics: the text is cut off in its last line")
    wanted = tuple(f"{name}{end}" for name in names for end in ("{", " "))
    lines = [line for line in text.split("\n") if line.startswith(wanted)]
    if len(lines) > _SAMPLES_MAX:
        raise ReadError(f"/metrics: more than {_SAMPLES_MAX} samples of {names[0]}")
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            yield from family.samples
    except (ValueError, IndexError, KeyError, TypeError):  # what its hand-written parser raises
        raise ReadError("/metrics: a line is no sample") from None
