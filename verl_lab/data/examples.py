"""Responses that come with the data: single ones for SFT and KTO, pairs for preferences.

A row of data becomes one sample, or two of one group: the chosen and the rejected response. Their
token ids are those that the policy would read and write, the end of the answer included.
"""

from __future__ import annotations

from verl_lab.batch.columns import COLUMNS, Batch

ANSWERS = ("response", "completion")
"""Columns that a single response may be in, the first that is there."""


def as_prompts(batch: Batch) -> Batch:
    """One row a prompt, without what belongs to a response: from samples back to what to answer."""
    first = batch.take([rows[0] for rows in batch.groups().values()])
    of_responses = {*COLUMNS, "is_chosen", "margin"} - {"group_id", "prompt", "prompt_ids", "step"}
    rewards = [name for name in first.names if name.startswith("reward/")]
    return first.without([*of_responses, *rewards, "greedy_reward"])
