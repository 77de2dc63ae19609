"""What one can be asked to do in the office: fourteen templates, and the site itself."""

from __future__ import annotations

import random
from typing import Any

from owrl_jax.worlds.desk import data, pages
from owrl_jax.worlds.desk.data import CATEGORIES, PEOPLE, PRIORITIES, Desk, Mail, Ticket, address
from owrl_jax.worlds.goals import Anything, Decoy, Goal, Like, Number, Text
from owrl_jax.worlds.script import Choose, Click, Fill, Move, Read
from owrl_jax.worlds.site import Case, Site, Templates
from owrl_jax.worlds.skins import DUSK, PAPER, PLAIN

templates = Templates()


def _open(m: Mail) -> tuple[Move, ...]:
    return (
        Fill("q", m.subject, f"I search for the mail “{m.subject}”.", enter=True),
        Click(f"mail-{m.ident}", "There it is; I open it."),
    )


def _mail_now(folder: str = "inbox", star: bool = False) -> dict[str, Any]:
    return {"folder": folder, "star": star}


def _ticket_now(t: Ticket, **changed: str) -> dict[str, Any]:
    return {"status": t.status, "priority": t.priority, "assignee": t.assignee, **changed}


def _two(desk: Desk, rng: random.Random) -> tuple[Mail, Mail]:
    a, b = rng.sample(list(desk.mails.values()), 2)
    return a, b


def _on_ticket(t: Ticket) -> tuple[Move, ...]:
    return (
        Click("nav-tickets", "Tickets have a page of their own."),
        Click(f"ticket-{t.ident}", f"I open {t.ident}."),
    )


@templates.add(
    "Star the mail “{subject}” from {sender}.",
    "Mark {sender}'s mail with the subject “{subject}” with a star.",
    "I want to find “{subject}” ({sender}) again: put a star on it.",
    level=1,
)
def star(desk: Desk, rng: random.Random) -> Case:
    m, other = _two(desk, rng)
    return Case(
        words={"subject": m.subject, "sender": m.sender},
        goal=Goal(changes={f"mail/{m.ident}": _mail_now(star=True)}),
        script=(*_open(m), Click("star", "I put the star on it.")),
        decoys=(
            Decoy(name="another mail", changes={f"mail/{other.ident}": _mail_now(star=True)}),
            Decoy(name="archived as well", changes={f"mail/{m.ident}": _mail_now("archive", True)}),
        ),
    )


@templates.add(
    "Delete the mail “{subject}”.",
    "Move “{subject}” from {sender} to the trash.",
    "I no longer need the mail “{subject}”; delete it.",
    level=1,
)
def delete(desk: Desk, rng: random.Random) -> Case:
    m, other = _two(desk, rng)
    return Case(
        words={"subject": m.subject, "sender": m.sender},
        goal=Goal(changes={f"mail/{m.ident}": _mail_now("trash")}),
        script=(*_open(m), Click("trash", "I delete it.")),
        decoys=(
            Decoy(name="archived instead", changes={f"mail/{m.ident}": _mail_now("archive")}),
            Decoy(name="another mail", changes={f"mail/{other.ident}": _mail_now("trash")}),
        ),
    )


@templates.add(
    "What is the reference in the mail “{subject}”?",
    "Open the mail “{subject}” from {sender} and tell me the reference.",
    "{sender} wrote about “{subject}”. Which reference does the mail give?",
    level=1,
)
def read_code(desk: Desk, rng: random.Random) -> Case:
    m, other = _two(desk, rng)
    return Case(
        words={"subject": m.subject, "sender": m.sender},
        goal=Goal(
            answer=Text(spellings=(m.code,), others=tuple(o.code for o in desk.mails.values() if o.code != m.code)),
            facts=(f"mail:{m.ident}",),
        ),
        script=(*_open(m), Read("text", f"The reference is {m.code}.")),
        said=m.code,
        decoys=(
            Decoy(name="reference of another mail", said=other.code),
            Decoy(name="last digit wrong", said=m.code[:-1] + str((int(m.code[-1]) + 1) % 10)),
        ),
    )


@templates.add(
    "What is the phone number of {person}?",
    "Look up {person}'s phone number in the contacts.",
    "I want to call {person}. Which number?",
    level=1,
)
def phone(desk: Desk, rng: random.Random) -> Case:
    person, other = rng.sample(PEOPLE, 2)
    number = desk.phones[person]
    return Case(
        words={"person": person},
        goal=Goal(
            answer=Text(spellings=(number, number.replace("-", "")), others=(desk.phones[other],)),
            facts=(f"contact:{person}",),
        ),
        script=(
            Click("nav-contacts", "Phone numbers are with the contacts."),
            Click(f"contact-{PEOPLE.index(person)}", f"I open {person}."),
            Read("details", f"The number is {number}."),
        ),
        said=number,
        decoys=(Decoy(name="somebody else's number", said=desk.phones[other]),),
    )


_REPLIES = (
    "Thank you, that works for me.",
    "I will be there at nine.",
    "Please send it again.",
    "I agree with this plan.",
)


@templates.add(
    "Reply to the mail “{subject}” with: {text}",
    "Answer {sender}'s mail “{subject}”. Write: {text}",
    "Send a reply to “{subject}” saying: {text}",
    level=2,
)
def reply(desk: Desk, rng: random.Random) -> Case:
    m, other = _two(desk, rng)
    text = rng.choice(_REPLIES)
    right = {
        "kind": "reply",
        "origin": m.ident,
        "to": address(m.sender),
        "subject": f"Re: {m.subject}",
        "text": Like(text),
    }
    return Case(
        words={"subject": m.subject, "sender": m.sender, "text": text},
        goal=Goal(changes={"sent/1": right}),
        script=(
            *_open(m),
            Click("reply", "I want to reply."),
            Fill("text", text, "Address and subject are filled in already; the text is missing."),
            Click("send", "The mail is ready."),
        ),
        decoys=(
            Decoy(name="another mail", changes={"sent/1": {**right, "origin": other.ident}}),
            Decoy(name="forwarded instead", changes={"sent/1": {**right, "kind": "forward"}}),
            Decoy(name="another text", changes={"sent/1": {**right, "text": "Thank you."}}),
            Decoy(name="sent twice", changes={"sent/1": right, "sent/2": right}),
        ),
    )


@templates.add(
    "Archive all mails from {sender} in the inbox.",
    "Move everything that {sender} sent me to the archive.",
    "Clean up: every mail by {sender} belongs into the archive.",
    level=2,
)
def archive_sender(desk: Desk, rng: random.Random) -> Case:
    by: dict[str, list[Mail]] = {}
    for m in desk.mails.values():
        by.setdefault(m.sender, []).append(m)
    sender = rng.choice(sorted(s for s, mails in by.items() if len(mails) in (2, 3)))
    mine = by[sender]
    stranger = next(m for m in desk.mails.values() if m.sender != sender)
    steps: list[Move] = []
    for m in mine:
        steps += [
            Fill("q", sender, f"I search for mails of {sender}.", enter=True),
            Click(f"mail-{m.ident}", f"“{m.subject}” is still in the inbox."),
            Click("archive", "I archive it."),
        ]
    changes = {f"mail/{m.ident}": _mail_now("archive") for m in mine}
    return Case(
        words={"sender": sender},
        goal=Goal(changes=changes),
        script=tuple(steps),
        decoys=(
            Decoy(name="one of somebody else too", changes={**changes, f"mail/{stranger.ident}": _mail_now("archive")}),
            Decoy(name="deleted instead", changes={k: _mail_now("trash") for k in changes}),
        ),
    )


@templates.add(
    "How many {item} are listed in the attachment of the mail “{subject}”?",
    "Open the file attached to “{subject}” and tell me the amount of {item}.",
    "{sender} attached a list to the mail “{subject}”. What amount does it give for {item}?",
    level=2,
)
def attachment_number(desk: Desk, rng: random.Random) -> Case:
    m = rng.choice([m for m in desk.mails.values() if m.attachment])
    assert m.attachment is not None
    item, amount = rng.choice(m.attachment[1])
    other = next(n for i, n in m.attachment[1] if i != item and n != amount)
    return Case(
        words={"item": item.lower(), "subject": m.subject, "sender": m.sender},
        goal=Goal(answer=Number(value=amount), facts=(f"attachment:{m.ident}",)),
        script=(
            *_open(m),
            Click("attachment", "The list is in the attachment."),
            Read("file", f"{item}: {amount}."),
        ),
        said=str(amount),
        decoys=(
            Decoy(name="another row", said=str(other)),
            Decoy(name="file never opened", facts=(f"mail:{m.ident}",)),
        ),
    )


@templates.add(
    "Close ticket {ident}.",
    "Set the status of {ident} to closed.",
    "{ident} is solved; close it.",
    level=1,
)
def close_ticket(desk: Desk, rng: random.Random) -> Case:
    t = rng.choice([t for t in desk.tickets.values() if t.status != "closed"])
    other = next(o for o in desk.tickets.values() if o.status != "closed" and o is not t)
    key = f"ticket/{t.ident}"
    return Case(
        words={"ident": t.ident},
        goal=Goal(changes={key: _ticket_now(t, status="closed")}),
        script=(
            *_on_ticket(t),
            Click("status-closed", "The status shall be closed."),
            Click("save", "The change must be saved."),
        ),
        decoys=(
            Decoy(name="another ticket", changes={f"ticket/{other.ident}": _ticket_now(other, status="closed")}),
            Decoy(name="priority changed too", changes={key: _ticket_now(t, status="closed", priority="urgent")}),
        ),
    )


@templates.add(
    "Assign ticket {ident} to {person} and set its priority to {priority}.",
    "{person} takes over {ident}; its priority becomes {priority}.",
    "Ticket {ident}: assignee {person}, priority {priority}.",
    level=2,
)
def assign(desk: Desk, rng: random.Random) -> Case:
    t = rng.choice(list(desk.tickets.values()))
    person = rng.choice([p for p in PEOPLE[:4] if p != t.assignee])
    priority = rng.choice([p for p in PRIORITIES if p != t.priority])
    key = f"ticket/{t.ident}"
    return Case(
        words={"ident": t.ident, "person": person, "priority": priority},
        goal=Goal(changes={key: _ticket_now(t, assignee=person, priority=priority)}),
        script=(
            *_on_ticket(t),
            Click(f"priority-{priority}", f"The priority shall be {priority}."),
            Choose("assignee", person, f"{person} takes it over."),
            Click("save", "Both changes must be saved."),
        ),
        decoys=(
            Decoy(name="priority forgotten", changes={key: _ticket_now(t, assignee=person)}),
            Decoy(name="assignee forgotten", changes={key: _ticket_now(t, priority=priority)}),
        ),
    )


@templates.add(
    "How many open tickets have {priority} priority?",
    "Count the tickets with status open and priority {priority}.",
    "Tell me the number of open tickets of {priority} priority.",
    level=2,
    held_out=True,
)
def count_tickets(desk: Desk, rng: random.Random) -> Case:
    priority = rng.choice(PRIORITIES)
    n = sum(t.status == "open" and t.priority == priority for t in desk.tickets.values())
    every = sum(t.priority == priority for t in desk.tickets.values())
    return Case(
        words={"priority": priority},
        goal=Goal(answer=Number(value=n), facts=("tickets",)),
        script=(
            Click("nav-tickets", "Tickets have a page of their own."),
            Choose("status", "open", "Only open ones count."),
            Choose("priority", priority, f"The priority is {priority}."),
            Click("show", "I apply the filters."),
            Read("count", f"There are {n}."),
        ),
        said=str(n),
        decoys=(
            Decoy(name="status forgotten", said=str(every + (every == n))),
            Decoy(name="one less", said=f"There are {n - 1} of them."),
        ),
    )


@templates.add(
    "Assign the oldest open ticket with {priority} priority to {person}.",
    "Of the open tickets with {priority} priority, {person} should take the one opened first. Assign it.",
    "Find the open {priority}-priority ticket that has waited longest, and assign it to {person}.",
    level=3,
)
def assign_oldest(desk: Desk, rng: random.Random) -> Case:
    groups = {
        p: sorted((t for t in desk.tickets.values() if t.status == "open" and t.priority == p), key=lambda t: t.day)
        for p in PRIORITIES
    }
    priority = rng.choice([p for p, group in groups.items() if len(group) >= 2])
    t, second = groups[priority][:2]
    person = rng.choice([p for p in PEOPLE[:4] if p not in (t.assignee, second.assignee)])
    return Case(
        words={"priority": priority, "person": person},
        goal=Goal(changes={f"ticket/{t.ident}": _ticket_now(t, assignee=person)}),
        script=(
            Click("nav-tickets", "Tickets have a page of their own."),
            Choose("status", "open", "Only open ones count."),
            Choose("priority", priority, f"The priority is {priority}."),
            Choose("sort", "age", "The oldest shall come first."),
            Click("show", "I apply the filters."),
            Click(f"ticket-{t.ident}", f"{t.ident} is the oldest."),
            Choose("assignee", person, f"{person} takes it."),
            Click("save", "The change must be saved."),
        ),
        decoys=(
            Decoy(name="the second oldest", changes={f"ticket/{second.ident}": _ticket_now(second, assignee=person)}),
            Decoy(name="nobody", changes={f"ticket/{t.ident}": _ticket_now(t, assignee="")} if t.assignee else {}),
        ),
    )


@templates.add(
    "Create a {priority}-priority {category} ticket with the subject “{subject}” and the reference from the mail "
    "“{mail}”.",
    "Open a new ticket: subject “{subject}”, category {category}, priority {priority}. The reference is in the mail "
    "“{mail}”.",
    "From the mail “{mail}” take the reference and make a ticket “{subject}” ({category}, {priority}) with it.",
    level=3,
)
def ticket_from_mail(desk: Desk, rng: random.Random) -> Case:
    m, other = _two(desk, rng)
    category, priority = rng.choice(CATEGORIES), rng.choice(("low", "high"))
    subject = rng.choice(("Order new cables", "Replace the toner", "Check the projector", "Move two desks"))
    right = {
        "subject": Like(subject),
        "category": category,
        "priority": priority,
        "reference": m.code,
        "status": "open",
        "assignee": "",
    }
    wrong = next(c for c in CATEGORIES if c != category)
    return Case(
        words={"subject": subject, "category": category, "priority": priority, "mail": m.subject},
        goal=Goal(changes={"ticket/N1": right}, facts=(f"mail:{m.ident}",)),
        script=(
            *_open(m),
            Read("text", f"The reference is {m.code}."),
            Click("nav-tickets", "Now to the tickets."),
            Click("new", "A new one."),
            Fill("subject", subject, "The subject as asked for."),
            Click(f"category-{category}", f"The category is {category}."),
            Click(f"priority-{priority}", f"The priority is {priority}."),
            Fill("reference", m.code, "The reference from the mail."),
            Click("create", "Everything is filled in."),
        ),
        decoys=(
            Decoy(name="reference of another mail", changes={"ticket/N1": {**right, "reference": other.code}}),
            Decoy(name="default priority", changes={"ticket/N1": {**right, "priority": "normal"}}),
            Decoy(name="another category", changes={"ticket/N1": {**right, "category": wrong}}),
        ),
    )


@templates.add(
    "Forward the mail “{subject}” to {person}.",
    "{person} should get the mail “{subject}”; forward it.",
    "Please forward “{subject}” to our colleague {person}.",
    level=2,
    held_out=True,
)
def forward(desk: Desk, rng: random.Random) -> Case:
    m, other = _two(desk, rng)
    person, wrong = rng.sample([p for p in PEOPLE if p != m.sender], 2)
    right = {
        "kind": "forward",
        "origin": m.ident,
        "to": address(person),
        "subject": f"Fwd: {m.subject}",
        "text": "",
    }
    text = "For you."
    return Case(
        words={"subject": m.subject, "person": person},
        goal=Goal(changes={"sent/1": {**right, "text": Anything(text)}}),
        script=(
            *_open(m),
            Click("forward", "I want to forward it."),
            Fill("to", address(person), f"The address of {person} follows the pattern of the others."),
            Fill("text", text, "A short note."),
            Click("send", "The mail is ready."),
        ),
        decoys=(
            Decoy(name="somebody else", changes={"sent/1": {**right, "to": address(wrong)}}),
            Decoy(name="another mail", changes={"sent/1": {**right, "origin": other.ident}}),
            Decoy(name="a reply", changes={"sent/1": {**right, "kind": "reply", "to": address(m.sender)}}),
        ),
    )


@templates.add(
    "Add a comment to ticket {ident} that says “{text}”, and set its status to waiting.",
    "On {ident}, leave the comment “{text}”; afterwards the status should be waiting.",
    "Ticket {ident} has to wait: comment “{text}” and change the status to waiting.",
    level=3,
)
def comment_and_wait(desk: Desk, rng: random.Random) -> Case:
    t = rng.choice([t for t in desk.tickets.values() if t.status == "open"])
    text = rng.choice(("Parts are on order.", "The user is on holiday.", "Waiting for the supplier."))
    key, comment = f"ticket/{t.ident}", f"comment/{t.ident}/1"
    waiting = _ticket_now(t, status="waiting")
    return Case(
        words={"ident": t.ident, "text": text},
        goal=Goal(changes={key: waiting, comment: Like(text)}),
        script=(
            *_on_ticket(t),
            Fill("text", text, "First the comment."),
            Click("add", "I add it."),
            Click("status-waiting", "Then the status."),
            Click("save", "The change must be saved."),
        ),
        decoys=(
            Decoy(name="closed instead", changes={key: _ticket_now(t, status="closed"), comment: text}),
            Decoy(name="another text", changes={key: waiting, comment: "Waiting."}),
        ),
    )


SITE = Site(
    name="desk",
    title="Halyard Office",
    about="an office: mailbox with threads, search and attachments, contacts, tickets with filters and forms",
    skins=(PLAIN, DUSK, PAPER),
    templates=templates,
    routes=pages.routes,
    build=data.build,
    start=pages.start,
    menu=(("mail", "Mail", "/mail"), ("tickets", "Tickets", "/tickets"), ("contacts", "Contacts", "/contacts")),
)
