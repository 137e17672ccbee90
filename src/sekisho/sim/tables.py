"""What a campaign is shown as: the table of faults, and ``docs/faults.md``."""

from collections import Counter
from collections.abc import Iterable

from sekisho.sim.atlas import ATLAS
from sekisho.sim.campaign import Tally
from sekisho.sim.defences import DEFENCES

_DOC = """# Faults

Every fault that the simulator injects, the public report it is named after, where it comes in, and
what stops it. Generated from `sekisho.sim.atlas` and `sekisho.sim.defences` by `sekisho sim atlas`;
a test compares. `sekisho sim` prints how often each fired and how the requests it touched ended.

Not injected, because the design does not promise to see it: two simultaneous corruptions of a
header and of what its reader expects; a payload torn under an intact header, or read from a page
with a new owner, where no payload digest is asked for (they are injected under `strict`); a stray
payload that lands without its header, or between another write's payload and its header; a node
that lies about its own state.

| fault | public report | class | where | what happens there | stopped by |
|---|---|---|---|---|---|
{faults}

## Defences

Each can be taken away by name, `sekisho sim --without NAME`; `sekisho sim known-answers` shows for
each one a seed at which a checker then fails.

| defence | what it does | noticed by |
|---|---|---|
{defences}

Taken away alone, these are noticed by nobody, because another defence says the same; they are kept
for what they tell or save, and are not counted as defences: the counts of `Complete` (every header
is compared anyway), blanking the headers of granted pages (it tells *unwritten* from *foreign*),
pinning condemned pages (the step check sees the next foreign write too).
"""


def faults_document() -> str:
    """The text of ``docs/faults.md``."""
    faults = [
        f"| `{fault.name}` | {fault.reports} | {fault.sort} | {fault.seam} | {fault.effect} | "
        f"{fault.stops} |"
        for fault in ATLAS.values()
    ]
    defences = [
        f"| `{defence.name}` | {defence.does} | {', '.join(defence.checker)} |"
        for defence in DEFENCES.values()
    ]
    return _DOC.format(faults="\n".join(faults), defences="\n".join(defences))


def campaign_table(tally: Tally, names: Iterable[str]) -> list[str]:
    """How often each fault fired, and how the requests that it touched ended, most often first."""
    ends: dict[str, Counter[str]] = {}
    for (fault, end), count in tally.caught.items():
        ends.setdefault(fault, Counter())[end] += count
    width = max(map(len, ATLAS))
    lines = [f"{'fault':{width}}  {'fired':>8}  stopped by         requests it touched ended"]
    for name in names:
        shown = ", ".join(f"{end} {n}" for end, n in ends.get(name, Counter()).most_common(4))
        fired = tally.fired[name]
        lines.append(f"{name:{width}}  {fired:8}  {ATLAS[name].stops:17}  {shown}")
    return lines
