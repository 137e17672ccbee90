"""The probe's result as text, JSON, JUnit, SARIF, Markdown, GitHub annotations or an HTML page."""

from collections.abc import Callable, Mapping

from sekisho import report as formats
from sekisho.probe.exchange import Outcome
from sekisho.probe.model import Result
from sekisho.probe.output.about import About
from sekisho.probe.output.as_json import as_json
from sekisho.probe.output.cases import by_finding, by_technique
from sekisho.probe.output.html import html

__all__ = ["FORMATS", "About", "render"]

_Format = Callable[[Result, About, Mapping[int, Outcome]], str]

FORMATS: dict[str, _Format] = {
    "text": lambda *run: formats.text(by_finding(*run, every=False)),
    "json": as_json,
    "junit": lambda *run: formats.junit(by_technique(*run)),
    "sarif": lambda *run: formats.sarif(by_finding(*run, every=True)),
    "github": lambda *run: formats.github(by_finding(*run, every=False)),
    "markdown": lambda *run: formats.markdown(by_finding(*run, every=False)),
    "html": html,
}


def render(
    result: Result, about: About, exchanges: Mapping[int, Outcome], output_format: str
) -> str:
    """``result`` in one of `FORMATS`.

    Args:
        exchanges: of the run's log, by serial; what is missing is not shown.

    Raises:
        ValueError: there is no such format.
    """
    if output_format not in FORMATS:
        raise ValueError(f"no format {output_format!r}")
    return FORMATS[output_format](result, about, exchanges)
