"""JUnit XML as Jenkins and GitLab read it: suites, a suite, cases.

An error is a ``failure``; what could not be judged is an ``error``; what is waived is ``skipped``;
a warning passes, and says so in ``system-out``.
"""

from xml.etree import ElementTree as ET

from sekisho.report.clean import one_line
from sekisho.report.model import Case, Report, Status


def junit(report: Report) -> str:
    """Well-formed XML 1.0: no character that XML forbids is left after `one_line`."""
    kinds = [_kind(case) for case in report.cases]
    counts = {
        "tests": str(len(kinds)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
    }
    suites = ET.Element("testsuites", {"name": report.tool, **counts})
    suite = ET.SubElement(
        suites,
        "testsuite",
        {
            "name": report.tool,
            **counts,
            "skipped": str(kinds.count("skipped")),
            "timestamp": one_line(report.created).removesuffix("Z").removesuffix("+00:00"),
        },
    )
    for case, kind in zip(report.cases, kinds, strict=True):
        name = f"{one_line(case.name)} {case.rule}".strip() or "run"
        element = ET.SubElement(
            suite, "testcase", {"classname": report.tool.replace(" ", "."), "name": name}
        )
        told = one_line(case.message)
        if case.location:
            told += f" ({one_line(case.location)})"
        if kind == "skipped":
            ET.SubElement(element, kind, {"message": f"waived {one_line(case.waived)}: {told}"})
        elif kind in {"failure", "error"}:
            details = [f"{one_line(label)}: {one_line(value)}" for label, value in case.details]
            found = ET.SubElement(element, kind, {"type": case.rule or kind, "message": told})
            found.text = "\n".join([told, *details])
        else:
            ET.SubElement(element, "system-out").text = f"{case.status.value}: {told}"
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=False) + "\n"


def _kind(case: Case) -> str:
    if case.waived:
        return "skipped"
    return {Status.ERROR: "failure", Status.INCONCLUSIVE: "error"}.get(case.status, "")
