"""The ledger: hand-worked cases, and a machine that plays random histories against a plain model of the rules."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from owrl_jax.pool.leases import BrowserState, LeaseBook


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def up(book):
    generation = book.add_browser()
    book.move(generation, BrowserState.LAUNCHING)
    book.move(generation, BrowserState.READY)
    return generation


def grant(book, ttl_s=9.0):
    """A lease on the browser that the ledger itself would choose."""
    place = book.place()
    assert place is not None
    return book.grant(place, ttl_s=ttl_s)


def give_back(book, lease):
    assert book.begin_release(lease.id)
    book.finish_release(lease.id)


def test_spreads_over_browsers_before_it_doubles_up():
    book = LeaseBook(contexts_per_browser=2, recycle_after=10)
    first, second = up(book), up(book)
    places = [grant(book).generation for _ in range(4)]
    assert places == [first, second, first, second]
    assert book.place() is None and book.free_places() == 0
    with pytest.raises(ValueError, match="no room"):
        book.grant(first, ttl_s=9)


def test_a_browser_drains_with_its_last_episode_and_is_forgotten_when_dead():
    book = LeaseBook(contexts_per_browser=4, recycle_after=2)
    generation = up(book)
    assert book.free_places() == 2, "recycling bounds the places, not only the width"
    one, two = (book.grant(generation, ttl_s=9) for _ in range(2))
    assert book.state(generation) is BrowserState.DRAINING and book.place() is None
    give_back(book, one)
    assert book.leases_of(generation) == (two,)
    give_back(book, two)
    assert book.state(generation) is BrowserState.DRAINING, "ending the process is the fleet's to do"
    book.move(generation, BrowserState.DEAD)
    assert book.audit().browsers == {}


def test_release_is_given_to_one_caller_alone():
    book = LeaseBook(contexts_per_browser=1, recycle_after=9)
    lease = book.grant(up(book), ttl_s=9)
    assert [book.begin_release(lease.id) for _ in range(3)] == [True, False, False]
    assert not book.heartbeat(lease.id) and not book.valid(lease.id)
    assert book.place() is None, "the place is taken until the context is really gone"
    book.finish_release(lease.id)
    with pytest.raises(KeyError, match="not being given back"):
        book.finish_release(lease.id)
    assert book.place() == lease.generation
    assert (book.audit().acquired, book.audit().released, book.audit().live) == (1, 1, 0)


def test_time_to_live_counts_from_the_last_heartbeat():
    clock = Clock()
    book = LeaseBook(contexts_per_browser=2, recycle_after=9, clock=clock)
    generation = up(book)
    quiet, lively = (book.grant(generation, ttl_s=10) for _ in range(2))
    clock.now += 8
    assert book.heartbeat(lively.id)
    clock.now += 3
    assert book.expired() == (quiet,)
    assert not book.valid(quiet.id) and book.valid(lively.id)
    assert book.begin_release(quiet.id)
    assert book.expired() == (), "one that is being given back is not taken back again"


def test_a_lease_of_a_dead_browser_is_void_and_still_given_back():
    book = LeaseBook(contexts_per_browser=1, recycle_after=9)
    generation = up(book)
    lease = book.grant(generation, ttl_s=9)
    book.move(generation, BrowserState.DEAD)
    assert not book.valid(lease.id)
    assert book.audit().live == 1
    give_back(book, lease)
    assert book.audit().balanced and book.audit().live == 0
    assert up(book) > generation, "a generation never comes back"


@pytest.mark.parametrize(
    ("path", "bad"),
    [
        ((), BrowserState.READY),
        ((BrowserState.LAUNCHING,), BrowserState.LEASED),
        ((BrowserState.LAUNCHING, BrowserState.READY, BrowserState.DRAINING), BrowserState.READY),
    ],
)
def test_steps_a_browser_does_not_have_are_refused(path, bad):
    book = LeaseBook(contexts_per_browser=1, recycle_after=9)
    generation = book.add_browser()
    for state in path:
        book.move(generation, state)
    with pytest.raises(ValueError, match="cannot go from"):
        book.move(generation, bad)


@pytest.mark.parametrize(
    "sizes", [{"contexts_per_browser": 0, "recycle_after": 1}, {"contexts_per_browser": 1, "recycle_after": 0}]
)
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        LeaseBook(**sizes)


class Histories(RuleBasedStateMachine):
    """Any order of launching, granting, releasing, dying. The model is three sets; the ledger must agree with it."""

    generations = Bundle("generations")
    leases = Bundle("leases")
    returning = Bundle("returning")
    WIDTH, RECYCLE, TTL = 2, 3, 5.0

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.book = LeaseBook(contexts_per_browser=self.WIDTH, recycle_after=self.RECYCLE, clock=self.clock)
        self.given, self.back = {}, set()  # lease id -> last sign of life; ids finished
        self.leaving = set()
        self.granted_on, self.on, self.dead = {}, {}, set()

    @rule(target=generations)
    def launch(self):
        generation = up(self.book)
        self.granted_on[generation], self.on[generation] = 0, set()
        return generation

    @precondition(lambda self: self.book.place() is not None)
    @rule(target=leases)
    def grant(self):
        lease = grant(self.book, self.TTL)
        assert lease.generation not in self.dead
        self.granted_on[lease.generation] += 1
        self.on[lease.generation].add(lease.id)
        self.given[lease.id] = self.clock.now
        return lease

    @rule(lease=leases)
    def beat(self, lease):
        alive = lease.id in self.given and lease.id not in self.leaving
        assert self.book.heartbeat(lease.id) == alive
        if alive:
            self.given[lease.id] = self.clock.now

    @rule(target=returning, lease=leases)
    def begin(self, lease):
        first = lease.id in self.given and lease.id not in self.leaving
        assert self.book.begin_release(lease.id) == first
        if first:
            self.leaving.add(lease.id)
        return lease

    @rule(lease=consumes(returning))
    def finish(self, lease):
        if lease.id in self.back:
            with pytest.raises(KeyError):
                self.book.finish_release(lease.id)
            return
        self.book.finish_release(lease.id)
        self.back.add(lease.id)
        self.on[lease.generation].discard(lease.id)
        del self.given[lease.id]

    @rule(generation=generations)
    def die(self, generation):
        if generation not in self.dead:
            self.book.move(generation, BrowserState.DEAD)
            self.dead.add(generation)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds):
        self.clock.now += seconds

    @invariant()
    def agrees(self):
        audit = self.book.audit()
        assert audit.balanced
        assert audit.live == len(self.given) and audit.released == len(self.back)
        late = {i for i, t in self.given.items() if self.clock.now - t > self.TTL} - self.leaving
        assert {lease.id for lease in self.book.expired()} == late
        for generation, ids in self.on.items():
            assert {lease.id for lease in self.book.leases_of(generation)} == ids
            assert len(ids) <= self.WIDTH and self.granted_on[generation] <= self.RECYCLE


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
