"""How a session shows itself in a notebook: one table, a pure function of its status."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_lab.config.schema import LabConfig

SHOWN = ("reward/mean", "eval/accuracy", "policy/kl_ref", "rollout/response_tokens", "time/step_s")


def session_html(name: str, config: LabConfig, status: dict[str, Any]) -> str:
    """State, progress, last metrics and workers, as self-contained HTML."""
    step, total = status.get("step", 0), status.get("steps_total") or config.steps
    stage = f" · {status['stage']}" if status.get("stage") else ""
    head = (
        f"<b>{escape(name)}</b> · {escape(status['state'])}{escape(stage)} · "
        f"step {step}/{total} <progress value='{step}' max='{total}'></progress>"
    )
    if "note" in status:
        head += f"<br>{escape(status['note'])}"
    last = status.get("last") or {}
    metrics = " · ".join(f"{escape(k)} {last[k]:.4g}" for k in SHOWN if k in last)
    rows = "".join(
        f"<tr><td>{escape(w['name'])}</td><td>{escape(w['device'])}</td>"
        f"<td>{escape(w['state'])}</td><td>{w['pid']}</td>"
        f"<td style='text-align:right'>{w['rss_bytes'] / 2**20:,.0f} MiB</td></tr>"
        for w in status.get("workers", [])
    )
    table = (
        "<table><tr><th>worker</th><th>device</th><th>doing</th><th>pid</th><th>memory</th></tr>"
        f"{rows}</table>"
        if rows
        else ""
    )
    return f"<div>{head}<br>{metrics}{table}</div>"
