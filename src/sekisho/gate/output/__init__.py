"""The gate's result as text, JSON, JUnit, SARIF, GitHub annotations or Markdown."""

from collections.abc import Callable

import msgspec

from sekisho import report as formats
from sekisho.gate.model import GateError, Result
from sekisho.gate.output.cases import report_of

_FORMATS: dict[str, Callable[[formats.Report], str]] = {
    "text": formats.text,
    "junit": formats.junit,
    "sarif": formats.sarif,
    "github": formats.github,
    "markdown": formats.markdown,
}


def render(result: Result, output_format: str) -> str:
    """``result`` in a format of `_FORMATS`, or as ``json``: the result itself with its exit code
    and verdict, in ASCII with every control character escaped.

    Raises:
        GateError: there is no such format.
    """
    if output_format == "json":
        return _json(result)
    if output_format not in _FORMATS:
        raise GateError(f"no format {output_format!r}")
    return _FORMATS[output_format](report_of(result))


def _json(result: Result) -> str:
    import json

    plain = msgspec.to_builtins(result)
    verdict = report_of(result).verdict
    whole = {"verdict": verdict, "exit_code": result.exit_code(), **plain}
    return json.dumps(whole, indent=2, ensure_ascii=True) + "\n"
