"""Splitting a batch by tokens: into micro-batches that fit, and over the workers of a group."""

from __future__ import annotations

from collections.abc import Sequence

from verl_lab.errors import ShapeError


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows in as few bins of at most `max_tokens` as first-fit decreasing finds, each in row order.

    A row longer than `max_tokens` gets a bin of its own. The result depends on nothing but the
    input.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        fits = next((i for i, left in enumerate(room) if left >= lengths[row]), None)
        if fits is None:
            bins.append([row])
            room.append(max_tokens - lengths[row])
        else:
            bins[fits].append(row)
            room[fits] -= lengths[row]
    return [sorted(rows) for rows in bins]


def split_groups(lengths: Sequence[int], group_ids: Sequence[int], parts: int) -> list[list[int]]:
    """Rows for each of `parts` workers, balanced by tokens, the rows of a group together.

    Largest group first, to the worker with the fewest tokens so far; rows stay in order within a
    part. A part is empty where there are fewer groups than parts.
    """
    if len(lengths) != len(group_ids):
        raise ShapeError(f"lengths: {len(lengths)} of them for {len(group_ids)} group_ids")
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        groups.setdefault(group, []).append(row)
    loads = [0] * parts
    shares: list[list[int]] = [[] for _ in range(parts)]
    for rows in sorted(groups.values(), key=lambda rows: (-sum(lengths[r] for r in rows), rows[0])):
        lightest = loads.index(min(loads))
        shares[lightest].extend(rows)
        loads[lightest] += sum(lengths[row] for row in rows)
    return [sorted(share) for share in shares]
