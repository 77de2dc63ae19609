"""Mails, attachments, contacts and tickets from a seed. Subjects are unique, so that a task can name one."""

from __future__ import annotations

import dataclasses
import functools
import random

PEOPLE = (
    "Amira Haddad",
    "Boris Klein",
    "Chiara Ricci",
    "Daan Visser",
    "Ewa Nowak",
    "Finn Larsen",
    "Grace Mbeki",
    "Hana Sato",
    "Ivan Petrov",
    "Julia Costa",
)
FOLDERS = ("inbox", "archive", "trash")
STATUSES = ("open", "waiting", "closed")
PRIORITIES = ("low", "normal", "high")
CATEGORIES = ("hardware", "software", "access")
_TOPICS = (
    "Quarterly figures",
    "Room booking",
    "Printer on the third floor",
    "Travel plans",
    "Contract draft",
    "New badge",
    "Team lunch",
    "Server move",
    "Price list",
    "Visitor parking",
    "Training day",
    "Broken chair",
    "Photo permission",
    "Holiday rota",
    "Coffee fund",
    "Fire drill",
    "Office keys",
    "Library order",
    "Bike shed",
    "Summer party",
)
_OPENERS = (
    "I hope you are well.",
    "A short note before the weekend.",
    "As discussed on the phone, here is what I know.",
    "Sorry for the late reply.",
    "This one should not take long.",
)
_CLOSERS = ("Let me know what you think.", "No hurry.", "Thanks in advance.", "See you on Monday.", "Best wishes,")
_PROBLEMS = (
    "Monitor stays dark",
    "Cannot log in",
    "Keyboard misses letters",
    "Mail does not sync",
    "Laptop is slow",
    "Badge is refused",
    "Licence has run out",
    "Headset crackles",
    "Screen flickers",
    "Password was forgotten",
    "Update fails",
    "Dock is not found",
    "Calendar is empty",
    "Shared drive is gone",
    "Phone does not ring",
    "Camera is blurred",
)


def address(person: str) -> str:
    """The mail address of a colleague."""
    return person.lower().replace(" ", ".") + "@office.example"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mail:
    """One mail; `code` stands in its text, `attachment` is (file name, lines) or None."""

    ident: str
    sender: str
    subject: str
    day: str
    paragraphs: tuple[str, ...]
    code: str
    attachment: tuple[str, tuple[tuple[str, int], ...]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticket:
    """One request to the service desk, as it was at the start; `day` is when it was opened, all different."""

    ident: str
    subject: str
    requester: str
    day: str
    status: str
    priority: str
    category: str
    assignee: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Desk:
    """The office of one seed."""

    mails: dict[str, Mail]
    tickets: dict[str, Ticket]
    phones: dict[str, str]


@functools.lru_cache(maxsize=64)
def build(seed: int) -> Desk:
    """20 mails, 16 tickets, 10 colleagues."""
    rng = random.Random(f"desk/{seed}")
    mails = {}
    days = sorted(rng.sample(range(1, 100), 20), reverse=True)
    for i, topic in enumerate(rng.sample(_TOPICS, 20)):
        ident = f"m{i + 1:02d}"
        code = f"{rng.choice('ABCDEFGHKLMNPRSTUVW')}{rng.choice('ABCDEFGHKLMNPRSTUVW')}-{rng.randint(1000, 9999)}"
        rows = None
        if i % 4 == 1:
            items = rng.sample(("Paper", "Toner", "Chairs", "Cables", "Lamps", "Folders", "Cups"), 4)
            rows = (f"{topic.lower().replace(' ', '-')}.csv", tuple((x, rng.randint(12, 480)) for x in items))
        mails[ident] = Mail(
            ident=ident,
            sender=PEOPLE[i % 10] if i < 10 else rng.choice(PEOPLE),
            subject=topic,
            day=f"2031-{2 + days[i] // 28:02d}-{1 + days[i] % 28:02d}",
            paragraphs=(rng.choice(_OPENERS), f"The reference for this matter is {code}.", rng.choice(_CLOSERS)),
            code=code,
            attachment=rows,
        )
    tickets = {}
    opened = sorted(rng.sample(range(1, 80), 16))
    for i, problem in enumerate(rng.sample(_PROBLEMS, 16)):
        ident = f"T{1041 + 7 * i}"
        tickets[ident] = Ticket(
            ident=ident,
            subject=problem,
            requester=rng.choice(PEOPLE),
            day=f"2031-{3 + opened[i] // 28:02d}-{1 + opened[i] % 28:02d}",
            status="open" if i % 3 != 2 else rng.choice(STATUSES),
            priority=PRIORITIES[(i + seed) % 3],
            category=rng.choice(CATEGORIES),
            assignee=rng.choice(("", *PEOPLE[:4])),
        )
    shuffled = list(tickets.items())
    rng.shuffle(shuffled)
    phones = {p: f"{rng.randint(200, 899)}-{rng.randint(1000, 9999)}" for p in PEOPLE}
    return Desk(mails=mails, tickets=dict(shuffled), phones=phones)
