"""Who was busy when, from the spans of a run. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def utilisation(spans: pd.DataFrame, first: int = 1, last: int | None = None) -> pd.DataFrame:
    """How much of the time each worker was busy, over some steps.

    The time goes from the first beginning to the last end of a span of these steps. Spans of one
    worker that overlap count once.

    Args:
        spans: as `Reader.spans` gives them: worker, device, kind, step, start and end in seconds.
        first: the first step.
        last: the last step; the last there is by default.

    Returns:
        A row a worker: its `device`, `busy_s`, `share` from 0 to 1, and the seconds of each kind.
    """
    import pandas as pd

    chosen = spans[(spans["step"] >= first) & (spans["step"] <= (last or spans["step"].max()))]
    if not len(chosen):
        return pd.DataFrame(columns=["device", "busy_s", "share"])
    whole = chosen["end"].max() - chosen["start"].min()
    rows = {}
    for worker, own in chosen.groupby("worker"):
        kinds = (own["end"] - own["start"]).groupby(own["kind"]).sum()
        busy = _covered(own[["start", "end"]].sort_values("start").to_numpy().tolist())
        rows[worker] = {
            "device": own["device"].iloc[0],
            "busy_s": busy,
            "share": busy / whole if whole > 0 else 0.0,
            **{f"{kind}_s": seconds for kind, seconds in kinds.items()},
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("worker")


def _covered(intervals: list[list[float]]) -> float:
    """The length of the union of intervals, sorted by their beginning."""
    total, reached = 0.0, float("-inf")
    for start, end in intervals:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
