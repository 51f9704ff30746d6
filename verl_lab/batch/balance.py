"""Splitting a batch by tokens: into micro-batches that fit, and over the workers of a group."""

from __future__ import annotations

from collections.abc import Sequence

from verl_lab.errors import ShapeError


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows in as few bins of at most `max_tokens` as first-fit decreasing finds, each in row order.

    The bins hold about the same number of tokens where that many even ones fit, so that the
    largest needs less memory. A row longer than `max_tokens` gets a bin of its own. The result
    depends on nothing but the input.
    """
    tight = _first_fit(lengths, max_tokens)
    even = _spread(lengths, len(tight))
    fits = all(sum(lengths[row] for row in rows) <= max_tokens for rows in even)
    return [sorted(rows) for rows in (even if fits else tight)]


def split_groups(lengths: Sequence[int], group_ids: Sequence[int], parts: int) -> list[list[int]]:
    """Rows for each of `parts` workers, balanced by tokens, the rows of a group together.

    Largest group first, to the worker with the fewest tokens so far; rows stay in order within a
    part. A part is empty where there are fewer groups than parts.
    """
    if len(lengths) != len(group_ids):
        raise ShapeError(
            f"lengths: {len(lengths)} of them for {len(group_ids)} group_ids; give one a row"
        )
    found: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        found.setdefault(group, []).append(row)
    groups = list(found.values())
    shares = _spread([sum(lengths[row] for row in rows) for rows in groups], parts)
    return [sorted(row for group in share for row in groups[group]) for share in shares]


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in _largest_first(lengths):
        fits = next((i for i, left in enumerate(room) if left >= lengths[row]), None)
        if fits is None:
            bins.append([row])
            room.append(max_tokens - lengths[row])
        else:
            bins[fits].append(row)
            room[fits] -= lengths[row]
    return bins


def _spread(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices for each part, largest first, each to the part with the least so far."""
    loads = [0] * parts
    shares: list[list[int]] = [[] for _ in range(parts)]
    for index in _largest_first(sizes):
        lightest = loads.index(min(loads))
        shares[lightest].append(index)
        loads[lightest] += sizes[index]
    return shares


def _largest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
