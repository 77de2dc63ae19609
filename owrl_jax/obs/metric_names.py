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
rollout/groups_rejected_{why}          finished groups given up before they were trained on, by why
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
judge/precision_share_per_verdict      of what the training judge calls a success, the share that the program does
judge/recall_share_per_verdict         of what the program calls a success, the share that the training judge does
judge/f1_per_verdict                   harmonic mean of the two
judge/invalid_share_per_verdict        of what the program could tell, the share that the training judge could not
judge/compared_verdicts                verdicts that these shares are over: both could tell
judge/second_{what}                    the same with a held-out judge in place of the program
judge/drift_gap_share                  success share of the training judge minus that of the other, newest window
judge/drift                            1 if a window's test says that the training judge has become too kind
judge/calls                            requests to all judges of the run, since it began
judge/cost_usd                         what they cost, since the run began
sft/loss_nats_per_token                cross-entropy of demonstrated responses
sft/accuracy_share_per_token           tokens of demonstrated responses that are the likeliest
sft/tokens_per_s                       response tokens trained per second
sft/learning_rate                      of the optimiser
sft/grad_norm                          norm of the gradient before clipping
loss/total                             the objective, mean over updates of the iteration
loss/policy                            its policy part; stands beside `total` where there are others
loss/kl_reference                      its distance to the reference policy
policy/logp_mean                       log-prob of response tokens, nats, mean per token
policy/entropy_mean                    of the policy at response tokens, nats, mean per token
policy/kl_behaviour_mean               estimate of the divergence from the behaviour policy, nats, mean per token
policy/ratio_mean                      probability ratio of new to behaviour policy, mean per token
policy/ratio_max                       the largest
policy/log_ratio_max                   largest size of its logarithm
policy/advantage_max                   largest size of an advantage
policy/clip_fraction                   share of response tokens whose ratio the objective cut
policy/clip_fraction_above             of these, where the ratio had grown
policy/importance_mean                 weight of stale tokens, mean per token
policy/importance_capped_mean          share of tokens whose weight was capped
grad/norm                              norm of the gradient before clipping
grad/norm/{module}                     of one part of the model
grad/clip_factor                       what clipping multiplied the gradient with
optimizer/learning_rate                of the newest update
update/trajectories                    trajectories in an update
update/trajectories_{why}              of these, left out, by why
update/turns                           turns in an update
update/response_tokens                 tokens that the loss is over
update/tokens                          tokens computed, contexts included
update/token_slots                     the same with padding
update/useful_token_share              tokens over token slots
update/tokens_saved_ratio              tokens of one row per turn over tokens computed
update/patches                         picture patches computed
update/micro_batches                   forward and backward passes
update/weight                          sum of the loss weights
update/normaliser                      what the sum of an update's losses is divided by
update/count                           optimiser steps in this iteration
update/updates                         optimiser steps since the run began
mismatch/logp_mean                     size of engine log-prob minus recomputed log-prob, nats, mean per token
mismatch/logp_p99                      its 99th percentile
mismatch/logp_max                      its largest
mismatch/logp_signed_mean              the same with its sign, mean per token
mismatch/ratio_max                     largest ratio of recomputed to engine probability
mismatch/tokens                        tokens that were compared
mismatch/trajectories                  trajectories they are of
mismatch/logp_mean_turn_{turn}         mean size by number of the turn
engine/tokens_per_s                    response tokens sampled per second
engine/output_tokens                   response tokens sampled since the engine's start
engine/prompt_tokens_cached            prompt tokens found in the prefix cache since the engine's start
engine/prompt_tokens_asked             prompt tokens of admitted requests since the engine's start
engine/recompiles                      programs compiled after the engine's start; 0 unless something is wrong
engine/{counter}                       other counters since the engine's start; `_now` is of this moment
browser/steps                          turns that a sandbox ran
browser/steps_per_s                    the same per second of wall time
browser/step_p50_ms                    median time of a step
browser/step_p95_ms                    95th percentile of it
time/{phase}_s                         wall time by phase; moments that several phases share are divided among them
time/total_s                           their sum: the wall time that passed
time/iteration_s                       wall time of the iteration
busy/{phase}_s                         time in which the phase had work, whatever else ran beside it
perf/trajectories_per_min              trajectories trained per minute of wall time
perf/rss_mib                           resident memory of the process and its browsers
perf/disk_mib                          size of the run folder
perf/compiles                          programs compiled since the run began
eval/success_over_valid                successes over valid attempts of the newest evaluation
eval/{name}_success_share_all          successes over all attempts of an evaluation
eval/{name}_success_share_valid        successes over its valid attempts
eval/{name}_attempts                   attempts of it
eval/{name}_invalid_attempts           of those, invalid
""")

_EXACT_FIRST = sorted(NAMES, key=lambda row: "{" in row.name)


def meaning(name: str) -> str:
    """What a name counts; empty if the table does not have it."""
    return next((row.meaning for row in _EXACT_FIRST if row.fits(name)), "")


def undocumented(names: Iterable[str]) -> list[str]:
    """The names that the table does not have, sorted."""
    return sorted({name for name in names if not meaning(name)})


def markdown() -> str:
    """The table for docs/report.md."""
    return "| name | what it is |\n|---|---|\n" + "\n".join(f"| `{row.name}` | {row.meaning} |" for row in NAMES)


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown() + "\n")
