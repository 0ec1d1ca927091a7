"""What drafts cost and bring, and when an engine drafts, without one."""

from collections.abc import Sequence

from trainer.rollout.speculation.payoff import (
    ASSUMED_COST,
    FIRST_PAUSE,
    LEAST_COST,
    LONGEST_PAUSE,
    PAUSE,
    REMEMBERED,
    WINDOW,
    Payoff,
    StepTimes,
)


def times(plain: Sequence[float], drafting: Sequence[float], responses: int = 64) -> StepTimes:
    found = StepTimes()
    for seconds in plain:
        found.add(False, responses, seconds)
    for seconds in drafting:
        found.add(True, responses, seconds)
    return found


def test_the_cost_of_a_step_with_drafts_is_in_steps_without_them() -> None:
    assert times([2.0] * 3, [5.0] * 3).cost(64) == 2.5
    assert times([2.0, 2.0, 90.0], [5.0, 5.0, 0.1]).cost(64) == 2.5  # the odd ones do not count
    assert times([2.0] * 3, [1.0] * 3).cost(64) == LEAST_COST


def test_before_both_kinds_of_steps_were_timed_a_cost_is_assumed() -> None:
    assert times([], []).cost(64) == times([2.0], []).cost(64) == times([], [2.0]).cost(64) == ASSUMED_COST


def test_the_cost_is_that_of_about_as_many_responses() -> None:
    found = times([2.0], [5.0], responses=512)
    assert found.cost(8) == 2.5
    found.add(False, 8, 1.0)
    assert found.cost(8) == 2.5  # nothing is known of steps of eight with drafts
    found.add(True, 8, 4.0)
    assert found.cost(8) == found.cost(9) == found.cost(15) == 4.0
    assert found.cost(600) == 2.5


def test_only_the_last_steps_count() -> None:
    found = times([2.0], [9.0] * 100)
    for _ in range(REMEMBERED):
        found.add(True, 64, 3.0)
    assert found.cost(64) == 1.5


def payoff(cost: float) -> Payoff:
    """One that knows what a step with drafts costs."""
    found = Payoff()
    found.times.add(False, 8, 1.0)
    found.times.add(True, 8, cost)
    return found


def steps_until_due(found: Payoff, drafting: bool, tokens: float = 1.0) -> int:
    steps = 0
    while not found.is_due(drafting):
        found.count(tokens)
        steps += 1
    return steps


def trial(found: Payoff, promised: float, kept: float) -> int:
    """Waits until drafts are tried, tries them, and ends them; the steps without them."""
    steps = steps_until_due(found, drafting=False)
    while not found.will_pay(8, promised):
        found.decide(drafting=False, pays=False)
        steps += steps_until_due(found, drafting=False)
    found.decide(drafting=False, pays=True)
    assert steps_until_due(found, drafting=True, tokens=kept) == WINDOW
    assert not found.paid(8)
    found.decide(drafting=True, pays=False)
    return steps


def test_while_drafts_do_not_promise_to_pay_an_engine_looks_at_its_responses_more_rarely() -> None:
    found = payoff(cost=2.0)
    pauses = []
    for _ in range(7):
        pauses.append(steps_until_due(found, drafting=False))
        assert not found.will_pay(8, promised=2.1)  # little more than they cost
        found.decide(drafting=False, pays=False)
    assert pauses == [FIRST_PAUSE, 32, 64, 128, PAUSE, PAUSE, PAUSE]


def test_new_responses_are_looked_at_soon() -> None:
    found = payoff(cost=2.0)
    for _ in range(4):
        found.decide(drafting=False, pays=False)
    found.look_soon()
    assert steps_until_due(found, drafting=False) == FIRST_PAUSE


def test_drafts_go_on_while_a_step_brings_clearly_more_than_it_costs() -> None:
    found = payoff(cost=2.0)
    assert found.will_pay(8, promised=5.0)
    found.decide(drafting=False, pays=True)
    for tokens, pays in ((2.5, True), (2.3, True), (2.1, False)):
        assert steps_until_due(found, drafting=True, tokens=tokens) == WINDOW
        assert found.paid(8) == pays
        found.decide(drafting=True, pays=pays)


def test_a_promise_that_was_not_kept_is_believed_again_after_some_looks() -> None:
    found = payoff(cost=2.0)
    trial(found, promised=5.0, kept=1.5)
    looks = [found.will_pay(8, promised=5.0) for _ in range(4)]
    assert looks == [False, True, True, True]
    assert payoff(cost=2.0).will_pay(8, promised=5.0)


def test_promises_that_were_not_kept_are_believed_ever_later() -> None:
    found = payoff(cost=2.0)
    waited = [trial(found, promised=5.0, kept=1.5) for _ in range(8)]
    assert waited == sorted(waited)
    assert waited[0] == FIRST_PAUSE
    assert waited[-1] >= LONGEST_PAUSE


def test_after_drafts_paid_for_a_while_an_engine_looks_again_soon() -> None:
    found = payoff(cost=2.0)
    for _ in range(4):
        trial(found, promised=5.0, kept=1.5)
    assert steps_until_due(found, drafting=True, tokens=3.0) == WINDOW
    assert found.paid(8)
    found.decide(drafting=True, pays=True)
    assert steps_until_due(found, drafting=False) == FIRST_PAUSE
