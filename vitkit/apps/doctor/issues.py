"""Issues reported by checks, one line each with a verdict."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "note", "warn", "fail"]
VERDICTS: tuple[Verdict, ...] = ("ok", "note", "warn", "fail")
"""fail: training ends with an error, cannot learn its task, or is scored on images that it has seen; warn: probably not
intended; note: worth knowing."""


@dataclass(frozen=True)
class Issue:
    """One line of the report."""

    check: str
    """Name of the check, such as "class balance"."""
    verdict: Verdict
    message: str
    where: str = ""
    """Section of the config, such as "data.train"."""
    details: dict[str, Any] = field(default_factory=dict)
    """Numbers and texts behind the message, for use by programs."""


def report(issues: Sequence[Issue], *, hidden: Collection[str] = ()) -> str:
    """Format issues as text, by section, with the number of issues per verdict at the end.

    Args:
        hidden: verdicts of issues that are only counted.
    """
    shown = [issue for issue in issues if issue.verdict not in hidden]
    width = max((len(issue.check) for issue in shown), default=0)
    lines: list[str] = []
    for where in dict.fromkeys(issue.where for issue in shown):
        lines += ["", where] if where else [""]
        lines += [f"  {i.verdict:<4}  {i.check:<{width}}  {i.message}" for i in shown if i.where == where]
    counts = Counter(issue.verdict for issue in issues)
    lines += ["", ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(VERDICTS))]
    return "\n".join(lines).lstrip("\n")


def enumerate_items(items: Sequence[Any], limit: int = 5) -> str:
    """Format the first items and the number of the others: "a, b, and 3 more"."""
    more = f", and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(map(str, items[:limit])) + more


def percent(part: float, total: float) -> str:
    """Format a fraction as a percentage: "12 %", "0.3 %"."""
    fraction = 100 * part / total if total else 0.0
    return f"{fraction:.0f} %" if fraction >= 10 or fraction == 0 else f"{fraction:.2g} %"
