"""What a check says: one line, with a verdict."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "note", "warn", "fail"]
VERDICTS: tuple[Verdict, ...] = ("ok", "note", "warn", "fail")
"""fail: training ends with an error, or cannot learn what is wanted; warn: probably not meant so; note: to know."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    """What was looked at, such as "class balance"."""
    verdict: Verdict
    message: str
    where: str = ""
    """The config's section, such as "data.train"."""
    details: dict[str, Any] = field(default_factory=dict)
    """Plain numbers and texts behind the message, for programs."""


def report(findings: Sequence[Finding]) -> str:
    """The findings as text, by section, with a line that counts the verdicts at the end."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines: list[str] = []
    for where in dict.fromkeys(finding.where for finding in findings):
        lines += ["", where] if where else [""]
        for finding in findings:
            if finding.where == where:
                lines.append(f"  {finding.verdict:<4}  {finding.check:<{width}}  {finding.message}")
    counts = Counter(finding.verdict for finding in findings)
    lines += ["", ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(VERDICTS))]
    return "\n".join(lines).lstrip("\n")


def some(items: Sequence[Any], most: int = 5) -> str:
    """The first of many things, in words."""
    return ", ".join(map(str, items[:most])) + (f", and {len(items) - most} more" if len(items) > most else "")


def percent(part: float, whole: float) -> str:
    """A share as text: "12 %", "0.3 %"."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f} %" if share >= 10 or share == 0 else f"{share:.2g} %"
