"""How many groups may be promised, and the base stock that is aimed at.

Two quantities, never one: the *ceiling* follows from the staleness bound, the *stock target* from measured rates.

Why the ceiling suffices. Let `t` be the next step without a batch, `G` the groups of a batch, `d` the last step at
which a group may be consumed (oldest loaded step at its dispatch + `max_staleness`), and `N(d)` the unassigned groups
that expire at `d` or before. Every interleaving keeps `N(d) <= G * (d - t + 1)` for all `d >= t`: admission adds groups
of one `d` only while the total fits (this module), and a batch takes at least `N(d) - G * (d - t)` of those that expire
by `d`, for every `d` (`assignment`). Hence at `t = d` the last of them are in the batch, and none is ever too old.
Oversampled groups are beyond the ceiling on purpose and may end as dropped(stale).
"""

from __future__ import annotations

import math

from rollmill.scheduling.lifecycle import open_group
from rollmill.scheduling.state import State
from rollmill.scheduling.waves import open_wave

_ROUNDING = 1e-9


def ceiling_groups(state: State) -> int:
    """Return the most groups that may be promised (unassigned, assigned or leased) at once.

    Without oversampling that is `(max_staleness + 1 - lag) * G`, with `lag` the steps that the oldest serving weights
    are behind the trainer: it never depends on the absolute step.
    """
    if state.loaded_step is None:
        return 0
    settings = state.settings
    expires_step = min(state.loaded_step, state.optimizer_step) + settings.max_staleness
    steps = max(0, expires_step - state.next_step + 1)
    unassigned = math.floor(steps * settings.batch_groups * settings.group_oversampling + _ROUNDING)
    return unassigned + state.underway * settings.batch_groups


def promised_groups(state: State) -> int:
    """Return the places taken: unassigned groups, and those of batches not yet trained."""
    return len(state.book.unassigned) + state.underway * state.settings.batch_groups


def capacity_rollouts(state: State) -> int:
    """Return how many more rollouts the staleness bound allows."""
    return max(0, ceiling_groups(state) - promised_groups(state)) * state.settings.group_size


def stock_target(state: State) -> float:
    """Return the base stock in rollouts: what must be promised so that the next batch is ready in time.

    `B + (mu_t / y) * E[W_group]`, clipped to `[B, (max_staleness + 1) * B]`. The batch in the trainer's hands still
    counts as promised but can feed no later step, hence it is added to the first term, as soon as rollouts for the
    next step would sample from weights as new as they can be in time.

    Reference: base-stock policy of a produce-to-stock queue with random yield and perishable stock.
    """
    settings = state.settings
    batch = settings.batch_groups * settings.group_size * settings.group_oversampling
    rates = state.rates
    lead = rates.consumption.value / _yield(state) * rates.group_s.value
    spoken_for = batch if state.training and not _waits_for_fresh_weights(state) else 0.0
    wanted = batch + spoken_for + lead
    return min(max(wanted, batch), (settings.max_staleness + 1) * batch)


def _waits_for_fresh_weights(state: State) -> bool:
    """Whether newer weights will serve so soon that a batch started then, replacements too, is in time."""
    if state.loaded_step is None or state.loaded_step >= state.optimizer_step:
        return False
    rates = state.rates
    step_s = state.settings.batch_groups * state.settings.group_size / rates.consumption.value
    return rates.refresh_s.value + rates.group_s.value / _yield(state) < step_s


def needed_groups(state: State) -> int:
    """Return the unassigned groups that the steps without a batch can still use, at the present yield."""
    settings = state.settings
    places = (settings.total_steps - state.next_step) * settings.batch_groups
    return math.ceil(places * settings.group_oversampling / _yield(state) - _ROUNDING)


def _yield(state: State) -> float:
    if not state.settings.replace_zero_advantage:
        return 1.0
    return max(state.rates.signal.value, _ROUNDING)


def admit(state: State) -> None:
    """Open groups while the stock is below its target, the bound allows it, and they can still be used."""
    if state.loaded_step is None or state.stopping or state.halted:
        return
    settings = state.settings
    if settings.deterministic:
        open_wave(state)
        return
    promised = promised_groups(state)
    room = min(
        ceiling_groups(state) - promised,
        needed_groups(state) - len(state.book.unassigned),
        math.ceil(stock_target(state) / settings.group_size - _ROUNDING) - promised,
    )
    for _ in range(room):
        if not state.draws_left:
            return
        open_group(state, task_index=_draw(state), floor_step=state.loaded_step)


def _draw(state: State) -> int:
    if state.requeued:
        return state.requeued.popleft()
    state.next_task += 1
    return state.next_task - 1
