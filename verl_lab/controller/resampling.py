"""Dynamic sampling: other prompts in place of those whose samples teach nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_lab.batch.columns import Batch
from verl_lab.controller.estimation import constant_samples

if TYPE_CHECKING:
    from verl_lab.controller.lab import Lab


async def resample(lab: Lab, batch: Batch) -> Batch:
    """Replaces groups whose rewards are all equal by groups of other prompts (DAPO's dynamic
    sampling, arXiv:2503.14476, sec. 3.2).

    At most `algorithm.dynamic_sampling_rounds` times, each with as many prompts as should give the
    groups that are missing by the share kept so far, and never more than a step's. Groups beyond
    what the step needs are thrown away: kept, they would be stale. With fewer in the end the step
    trains on those there are, and where none is left on the batch as it was.
    """
    wanted = len(batch.groups())
    kept = [batch.filter(~constant_samples(batch, lab.parts))]
    num_kept, num_sampled, rounds = len(kept[0].groups()), wanted, 0
    while num_kept < wanted and rounds < lab.config.algorithm.dynamic_sampling_rounds:
        rounds += 1
        share = max(num_kept, 1) / num_sampled
        prompts = lab.draw(min(-int(-(wanted - num_kept) // share), wanted))
        with lab.timed("rollout"):
            more = await lab.generate(prompts, lab.sampling(), step=lab.next_step)
        with lab.timed("reward"):
            more, _ = await lab.score_parts(more)
        kept.append(more.filter(~constant_samples(more, lab.parts)))
        num_sampled += len(prompts)
        num_kept += len(kept[-1].groups())
    lab.metrics |= {
        "rollout/sampling_rounds": 1 + rounds,
        "rollout/constant_groups_dropped": num_sampled - num_kept,
        "rollout/surplus_groups_dropped": max(num_kept - wanted, 0),
    }
    if num_kept < wanted:
        lab.note(
            "short_batch",
            f"dynamic sampling: {num_kept} of {wanted} groups have rewards that differ after "
            f"{num_sampled} were sampled; raise algorithm.dynamic_sampling_rounds, or give "
            f"prompts that are neither too easy nor too hard",
        )
    if not num_kept:
        return batch
    found = Batch.concat([part for part in kept if len(part)])
    first = list(found.groups().values())[:wanted]
    return found.take(sorted(row for rows in first for row in rows))
