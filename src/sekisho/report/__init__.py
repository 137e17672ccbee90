"""Results in the formats that pipelines read: text, JSON, JUnit, SARIF 2.1.0, GitHub, Markdown.

A verb maps what it found to a `Report`; a format knows nothing of verbs. Names and messages come
from engines that may be hostile, so each format escapes them itself. Imports nothing of sekisho.
"""

from sekisho.report.github import github
from sekisho.report.junit import junit
from sekisho.report.markdown import markdown
from sekisho.report.model import Case, Report, RuleText, Status, Table
from sekisho.report.sarif import sarif
from sekisho.report.text import text

__all__ = [
    "Case",
    "Report",
    "RuleText",
    "Status",
    "Table",
    "github",
    "junit",
    "markdown",
    "sarif",
    "text",
]
