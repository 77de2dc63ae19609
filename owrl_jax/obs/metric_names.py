"""The names of metrics and what each one counts. docs/report.md prints this table; a test holds them equal.

A name is `room/quantity_unit`: `trajectories`, `turns`, `groups` or `tokens` say what is counted, `per_trajectory`,
`per_turn` or `per_token` what a mean is over, `share` is a number from 0 to 1, `s` seconds, `mib` mebibytes. `{…}`
stands for any words. A name that is not here can be logged; `undocumented` finds it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricName:
    """One row: a name, and what its number is."""

    name: str
    meaning: str

    def fits(self, name: str) -> bool:
        """Whether this row is about `name`."""
        parts = re.split(r"\{[a-z_]+\}", self.name)
        return re.fullmatch(r"[A-Za-z0-9_.@=+/-]+".join(map(re.escape, parts)), name) is not None


def _rows(text: str) -> tuple[MetricName, ...]:
    rows = []
    for line in text.strip().splitlines():
        name, _, meaning = line.strip().partition("  ")
        rows.append(MetricName(name=name, meaning=meaning.strip()))
    return tuple(rows)


NAMES = _rows("""
rollout/trajectories_finished          episodes that ended, whoever ended them; retries count
rollout/trajectories_valid             members of finished groups that have a reward
rollout/trajectories_excluded          members of finished groups that have none: they say nothing about the policy
rollout/trajectories_excluded/{why}    of those, by why: `unjudged`, `stale`, `invalid_verdict`, or the ending
rollout/trajectories_trained           trajectories in this iteration's batch
rollout/valid_share_per_trajectory     valid over valid and excluded
rollout/groups_kept                    groups in this iteration's batch
rollout/groups_dropped                 finished groups that teach nothing
rollout/groups_dropped_{why}           of those, by why: `zero_variance`, `single_valid`, `all_invalid`, …
rollout/groups_carried                 finished groups kept for a later iteration
rollout/turns_trained                  turns in this iteration's batch
rollout/turns_malformed                of those, turns that do not obey the format
rollout/turns_mean_per_trajectory      mean number of turns of valid trajectories
rollout/response_tokens_mean_per_turn  mean length of a response
rollout/staleness_mean_versions        policy versions between sampling and training, mean over trained tokens
rollout/staleness_max_versions         the same, largest
rollout/horizon_turns                  turns that an episode may take in this iteration
outcome/{reason}_trajectories          finished episodes by reason of their ending
owner/{owner}_trajectories             finished episodes by whose doing the ending was
reward/mean_per_trajectory             mean reward over valid trajectories, dropped groups included
reward/mean_per_trained_trajectory     mean reward over the batch
reward/mean_per_trained_turn           the same with each trajectory counted once per turn, as the gradient sees it
reward/success_share_per_trajectory    successes over valid trajectories
reward/format_share_per_turn           turns that obey the format
judge/verdicts_success                 trajectories judged a success
judge/verdicts_failure                 trajectories judged a failure
judge/verdicts_invalid                 trajectories that no judge could tell about
judge/agreement_share_per_verdict      verdicts of the training judge that equal the program's, where both exist
judge/calls                            requests to the judge
judge/cost_usd                         what they cost, since the run began
sft/loss_nats_per_token                cross-entropy of demonstrated responses
sft/accuracy_share_per_token           tokens of demonstrated responses that are the likeliest
sft/tokens_per_s                       response tokens trained per second
sft/learning_rate                      of the optimiser
sft/grad_norm                          norm of the gradient before clipping
train/loss                             the objective, mean over updates of the iteration
train/ratio_mean_per_token             probability ratio of new to behaviour policy
train/ratio_max_per_token              the largest
train/clip_share_per_token             tokens whose ratio the objective cut
train/kl_nats_per_token                estimate of the divergence from the behaviour policy
train/entropy_nats_per_token           of the policy at sampled tokens
train/grad_norm                        norm of the gradient before clipping, mean over updates
train/learning_rate                    of the optimiser
train/updates                          optimiser steps since the run began
train/tokens_trained                   response tokens in the batch
train/useful_share_per_token           tokens of packed rows that are no padding
train/mismatch_mean_nats_per_token     mean size of engine log-prob minus recomputed log-prob
train/mismatch_p99_nats_per_token      its 99th percentile
train/mismatch_max_nats_per_token      its largest
engine/tokens_sampled                  response tokens sampled
engine/tokens_per_s                    response tokens sampled per second of engine time
engine/prefix_hit_share_per_token      prompt tokens found in the prefix cache
engine/rows_mean                       sequences in a decode step, mean
browser/steps                          turns that a sandbox ran
browser/steps_per_s                    the same per second of wall time
browser/step_p50_ms                    median time of a step
browser/step_p95_ms                    95th percentile of it
time/{phase}_s                         wall time by phase; moments that several phases share are divided among them
time/total_s                           their sum: the wall time that passed
busy/{phase}_s                         time in which the phase had work, whatever else ran beside it
perf/trajectories_per_min              trajectories trained per minute of wall time
perf/rss_mib                           resident memory of the process and its browsers
perf/disk_mib                          size of the run folder
perf/compiles                          programs compiled since the run began
eval/{name}_success_share_all          successes over all attempts of an evaluation
eval/{name}_success_share_valid        successes over its valid attempts
eval/{name}_attempts                   attempts of it
eval/{name}_invalid_attempts           of those, invalid
""")


def meaning(name: str) -> str:
    """What a name counts; empty if the table does not have it."""
    return next((row.meaning for row in NAMES if row.fits(name)), "")


def undocumented(names: Iterable[str]) -> list[str]:
    """The names that the table does not have, sorted."""
    return sorted({name for name in names if not meaning(name)})


def markdown() -> str:
    """The table for docs/report.md."""
    return "| name | what it is |\n|---|---|\n" + "\n".join(f"| `{row.name}` | {row.meaning} |" for row in NAMES)


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown() + "\n")
