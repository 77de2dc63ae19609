"""Who computes what in the next step. Host logic alone: no array, no clock of its own, no thread.

`plan` chooses, the engine computes, `commit_prefill` and `commit_decode` take what came out. The rules:

- **Decoding goes first and never waits.** Every session that decodes is in every decode call. While prompts wait, calls
  are short, so that prompts and answers take turns.
- **Prompts share a chunk.** The oldest prompt gets at least half of the chunk's tokens, the rest goes to the others,
  shortest first: a long prompt never starves, a short one never waits for a long one to end.
- **Equal prefixes are computed once.** Before it computes, a prompt walks down the prefix tree; while another prompt of
  the same chunk computes the page it would begin with, it waits a step and then finds it there.
- **Memory is taken from the youngest.** When pages run out, idle cached pages go first, then the pages of sessions that
  are younger than the one in need. The oldest session can always go on, so there is always progress.
- A session holds: pages of the tree through one pin, pages of its own, a decoding row, pins of its images. `_release`
  gives all of it back, at whatever point it ends.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from owrl_jax.engine.pages import PagePool
from owrl_jax.engine.radix import PrefixTree
from owrl_jax.engine.request import Token
from owrl_jax.engine.session import ImageRun, Plan, Segment, Session, State
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.engine.vision_cache import Embedded, VisionCache


@dataclasses.dataclass(kw_only=True)
class Counts:
    """What happened so far."""

    prompt_tokens_asked: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_computed: int = 0
    tokens_recomputed: int = 0
    preemptions: int = 0
    pages_evicted: int = 0


class Scheduler:
    """Queue, running sessions, and everything they hold."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.pool = PagePool(settings.pool_pages)
        self.tree = PrefixTree(settings.page_tokens)
        self.vision = VisionCache(settings.vision_rows)
        self.waiting: list[Session] = []  # by age
        self.running: list[Session] = []  # by age
        self._rows: list[Session | None] = [None] * settings.max_rows
        self.counts = Counts()

    # --- coming and going -------------------------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        """Puts a session into the queue, at the place of its age."""
        session.state = State.WAITING
        bisect.insort(self.waiting, session, key=lambda s: s.number)

    def remove(self, session: Session) -> None:
        """Ends a session wherever it is."""
        if session.state == State.WAITING:
            self.waiting.remove(session)
        elif session.state != State.DONE:
            self._release(session)
            self.running.remove(session)
        session.state = State.DONE

    def sessions(self) -> list[Session]:
        """All that are not done."""
        return [*self.running, *self.waiting]

    def flush(self, *, restart: bool) -> None:
        """The weights have changed: forgets caches, and what was computed for prompts that have no answer yet.

        Args:
          restart: also begin answers anew, unless they are streamed; otherwise they go on with the keys they have.
        """
        for session in list(self.running):
            if not session.answer or (restart and session.request.on_token is None):
                self._requeue(session)
            else:
                session.cacheable = False
        for session in self.waiting:
            if restart and session.answer and session.request.on_token is None:
                session.tokens = list(session.request.ids)
                session.keys = session.keys[: session.prompt]
                session.answer = []
                session.first_token = None
        self.pool.give(self.tree.clear())
        self.vision.clear()

    # --- planning ---------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """What to compute next; empty if there is nothing to do."""
        self._admit(now)
        prefill_waits = any(s.state == State.PREFILL for s in self.running)
        steps = max(1, self.settings.decode_steps // 4) if prefill_waits else self.settings.decode_steps
        decode = self._plan_decode(steps)
        encode, prefill = self._plan_prefill()
        decode = tuple(s for s in decode if s.state == State.DECODE)  # a prompt that is older may have taken from it
        self._seat(decode)
        plan = Plan(encode=encode, prefill=prefill, decode=decode, steps=steps)
        if plan.empty and len(self.running) > 1:  # each holds what another waits for
            self._requeue(self.running[-1])
        return plan

    def _admit(self, now: float) -> None:
        while self.waiting and len(self.running) < self.settings.max_rows:
            session = self.waiting.pop(0)
            session.state = State.PREFILL
            if session.admitted is None:
                session.admitted = now
                self.counts.prompt_tokens_asked += session.prompt
            bisect.insort(self.running, session, key=lambda s: s.number)

    def _plan_decode(self, steps: int) -> tuple[Session, ...]:
        size = self.settings.page_tokens
        chosen = []
        for session in list(self.running):  # oldest first: it may take from those after it
            if session.state != State.DECODE:
                continue
            want = min(steps, session.remaining)
            if self._grow(session, -(-(session.computed + want) // size), take_from_younger=True):
                chosen.append(session)
            else:
                self._requeue(session)
        return tuple(s for s in chosen if s.state == State.DECODE)

    def _plan_prefill(self) -> tuple[tuple[tuple[ImageRun, Embedded], ...], tuple[Segment, ...]]:
        todo = [s for s in self.running if s.state == State.PREFILL]
        if not todo:
            return (), ()
        todo = next(([s] for s in todo if s.alone), todo)
        budget, past_left = self.settings.chunk_tokens[-1], self.settings.past_slots
        oldest = todo[0]
        order = [oldest, *sorted(todo[1:], key=lambda s: (s.uncomputed, s.number))]
        segments: list[Segment] = []
        encode: list[tuple[ImageRun, Embedded]] = []
        patches_left = self.settings.patch_buckets[-1]
        begun: set[tuple[int, bytes]] = set()  # pages that this step computes: (parent in the tree, key)
        share = max(budget // 2, budget - sum(s.uncomputed for s in order[1:]))
        for session in order:
            if budget <= 0 or len(segments) == self.settings.segments:
                break
            if session.state != State.PREFILL:  # preempted while planning
                continue
            self._adopt(session)
            size = self.settings.page_tokens
            past = -(-session.computed // size) * size
            if past > past_left or self._begins_with(session, begun):
                continue
            want = min(session.uncomputed, share if session is oldest else budget)
            end, fresh, entries = self._with_images(session, session.computed + want, patches_left)
            encode += fresh
            patches_left -= sum(len(run.patches.patches) for run, _ in fresh)
            if end <= session.computed:
                continue
            if not self._grow(session, -(-end // size), take_from_younger=session is oldest):
                continue
            self._mark(session, end, begun)
            segments.append(Segment(session=session, start=session.computed, end=end, entries=entries))
            budget -= end - session.computed
            past_left -= past
        segments = [s for s in segments if s.session.state == State.PREFILL]
        return tuple(encode), tuple(segments)

    def _adopt(self, session: Session) -> None:
        """Walks down the prefix tree as far as it spells the session's tokens. The last token is always computed."""
        size = self.settings.page_tokens
        if not (self.settings.prefix_cache and session.cacheable):
            return
        before, node = session.computed, session.path or self.tree.root
        if node.dead:
            return
        while (len(session.shared) + 1) * size < len(session.tokens):
            key = session.page_key(len(session.shared), size)
            following = None if key is None else self.tree.child(node, key)
            if following is None:
                break
            node = following
            session.shared.append(node.page)
            session.computed = len(session.shared) * size
        if session.computed > before:
            self.pool.give(session.own)  # the page it had begun itself, if any: another has completed it
            session.own = []
            self.tree.pin(node)
            self._unpin(session)
            session.path = node
            found = min(session.computed, session.prompt) - min(before, session.prompt)
            if not session.preemptions:
                session.cached += found
                self.counts.prompt_tokens_cached += found

    def _place(self, session: Session) -> int:
        """Identity of the tree node under which the session's next page would hang; its own if it is not shared."""
        return id(session.path or self.tree.root) if session.cacheable else id(session)

    def _begins_with(self, session: Session, begun: set[tuple[int, bytes]]) -> bool:
        size = self.settings.page_tokens
        if not (self.settings.prefix_cache and session.cacheable):
            return False
        if (len(session.shared) + 1) * size >= len(session.tokens):
            return False  # the page with the last token is computed by everyone
        key = session.page_key(len(session.shared), size)
        return key is not None and (self._place(session), key) in begun

    def _mark(self, session: Session, end: int, begun: set[tuple[int, bytes]]) -> None:
        key = session.page_key(session.computed // self.settings.page_tokens, self.settings.page_tokens)
        if key is not None and end > session.computed:  # also if this step does not complete it
            begun.add((self._place(session), key))

    def _with_images(
        self, session: Session, end: int, patches_left: int
    ) -> tuple[int, list[tuple[ImageRun, Embedded]], dict[int, Embedded]]:
        """How far a segment up to `end` can go with the images that are there or can be embedded in this step."""
        fresh: list[tuple[ImageRun, Embedded]] = []
        entries: dict[int, Embedded] = {}
        for number, run in enumerate(session.images):
            if run.end <= session.computed or run.start >= end:
                continue
            entry = session.pinned.get(number)
            if entry is None:
                known = run.digest in self.vision
                if not known and len(run.patches.patches) > patches_left:
                    return min(end, run.start), fresh, entries
                entry = self.vision.use(run.digest, run.end - run.start)
                if entry is None:
                    return min(end, run.start), fresh, entries
                session.pinned[number] = entry
            if not entry.ready:
                # Whoever computes with it in this step embeds it; ready from here on, since calls run in order.
                entry.ready = True
                fresh.append((run, entry))
                patches_left -= len(run.patches.patches)
            entries[number] = entry
        return end, fresh, entries

    def _grow(self, session: Session, pages: int, *, take_from_younger: bool) -> bool:
        """Gives a session pages up to that many; false if they cannot be had (it keeps what it got)."""
        while len(session.shared) + len(session.own) < pages:
            if not self.pool.free:
                evicted = self.tree.evict()
                if evicted is not None:
                    self.pool.give([evicted])
                    self.counts.pages_evicted += 1
                    continue
                youngest = self.running[-1]
                if not take_from_younger or youngest is session:
                    return False
                self._requeue(youngest)
                continue
            session.own.append(self.pool.take())
        return True

    def _seat(self, sessions: Iterable[Session]) -> None:
        """Gives every decoding session a row, and moves sessions down where a smaller call would hold them all."""
        sessions = list(sessions)
        if not sessions:
            return
        rows = next(b for b in self.settings.decode_rows if b >= len(sessions))
        for session in sessions:
            if session.row is not None and session.row >= rows:
                self._rows[session.row] = None
                session.row = None
        for session in sessions:
            if session.row is None:
                session.row = self._rows.index(None)
                self._rows[session.row] = session
                session.loaded = 0

    # --- what came out ----------------------------------------------------------------------------------------------

    def commit_prefill(self, segment: Segment) -> None:
        """The segment's keys are written."""
        session = segment.session
        new = min(segment.end, session.prompt) - min(segment.start, session.prompt)
        self.counts.tokens_recomputed += segment.end - segment.start if session.preemptions else 0
        self.counts.prompt_tokens_computed += 0 if session.preemptions else new
        session.computed = segment.end
        for number, run in enumerate(session.images):
            if run.end <= session.computed and number in session.pinned:
                self.vision.release(session.pinned.pop(number))
        self._share(session)

    def suspect(self, session: Session) -> None:
        """Its logits are not finite, and it had company, whose NaN this may be: begins it anew, in calls of its own."""
        session.alone = True
        self._requeue(session)

    def commit_token(self, session: Session, tokens: list[Token], now: float) -> None:
        """The session's next tokens. All but the last have keys, or, straight after prefill, all before it have."""
        if session.state == State.DECODE:
            session.computed += len(tokens)
        if session.first_token is None:
            session.first_token = now
        session.state = State.DECODE
        session.tokens += [t.id for t in tokens]
        session.answer += tokens

    def finish(self, session: Session) -> None:
        """The answer is complete: its full pages stay cached, everything else is given back."""
        self._share(session)
        self.remove(session)

    def _share(self, session: Session) -> None:
        """Hands the session's full pages to the prefix tree, or takes the tree's where it has the same already."""
        size = self.settings.page_tokens
        if not (self.settings.prefix_cache and session.cacheable):
            return
        node = session.path or self.tree.root
        while session.own and (len(session.shared) + 1) * size <= session.computed:
            key = session.page_key(len(session.shared), size)
            assert key is not None
            following, new = self.tree.extend(node, key, session.own[0])
            if following is node:
                break
            page = session.own.pop(0)
            if not new:
                self.pool.give([page])
            session.shared.append(following.page)
            self.tree.pin(following)
            self._unpin(session)
            session.path = node = following

    def _unpin(self, session: Session) -> None:
        if session.path is not None:
            self.pool.give(self.tree.unpin(session.path))
            session.path = None

    def _release(self, session: Session) -> None:
        self._unpin(session)
        self.pool.give(session.own)
        session.own, session.shared, session.computed, session.loaded = [], [], 0, 0
        if session.row is not None:
            self._rows[session.row] = None
            session.row = None
        for entry in session.pinned.values():
            self.vision.release(entry)
        session.pinned = {}

    def _requeue(self, session: Session) -> None:
        """Takes everything from a running session and lets it wait, at the place of its age."""
        self._share(session)  # what is full may still be there when its turn comes
        self._release(session)
        self.running.remove(session)
        session.preemptions += 1
        session.cacheable = True
        self.counts.preemptions += 1
        self.add(session)

    # --- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError unless everything held is held once and by someone alive."""
        self.tree.check()
        own = [page for session in self.running for page in session.own]
        self.pool.check([*own, *self.tree.pages()])
        self.vision.check([entry for session in self.running for entry in session.pinned.values()])
        pins: dict[int, int] = {}
        for session in self.running:
            if session.path is not None:
                pins[id(session.path)] = pins.get(id(session.path), 0) + 1
                spelled, node = [], session.path
                while node is not None and node is not self.tree.root:
                    spelled.append(node.page)
                    node = node.parent
                assert spelled[::-1] == session.shared, "a session's pages are not those of its path"
            else:
                assert not session.shared
            assert session.computed <= len(session.pages) * self.settings.page_tokens
            assert (session.row is None) or self._rows[session.row] is session
        for node in [*self.tree._walk(), *self.tree._orphans]:
            assert node.users == pins.get(id(node), 0), "pins are miscounted"
        for session in self.waiting:
            assert not (session.own or session.shared or session.pinned) and session.row is None
        seated = [s for s in self._rows if s is not None]
        assert all(s.state == State.DECODE for s in seated) and len(set(map(id, seated))) == len(seated)
