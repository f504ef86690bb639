"""Curves of training runs, drawn once for each kind of log: matplotlib takes longer than a tiny run trains."""

from pathlib import Path

from vitkit.apps.visualization.curves import plot_training, read_log

DRAWN: dict[tuple, bytes] = {}
"""Names of the losses and metrics in a log -> its figure."""


def plot_once(log_path: Path, out_path: Path) -> None:
    """Save the curves of a run, or a copy of those of an earlier run whose log has the same losses and metrics."""
    train, val = read_log(log_path)
    kind = tuple(
        frozenset(name for record in records for name in record.get(part, ()))
        for records in (train, val)
        for part in ("losses", "metrics")
    )
    if kind in DRAWN:
        out_path.write_bytes(DRAWN[kind])
    else:
        plot_training(log_path, out_path)
        DRAWN[kind] = out_path.read_bytes()
