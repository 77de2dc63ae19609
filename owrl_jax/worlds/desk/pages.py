"""The pages of the office.

State: `mail/<id>` folder and star of a mail; `sent/<n>` a sent mail; `ticket/<id>` what can change about a ticket;
`comment/<id>/<n>` a comment. Facts: `mail:<id>`, `attachment:<id>`, `ticket:<id>`, `tickets`, `contact:<name>`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from owrl_jax.worlds.desk.data import CATEGORIES, FOLDERS, PEOPLE, PRIORITIES, STATUSES, Desk, Mail, Ticket, address
from owrl_jax.worlds.goals import State, normal
from owrl_jax.worlds.html import e, field, hidden, options, radios, table
from owrl_jax.worlds.messages import Request, Response, see_other, whole
from owrl_jax.worlds.site import Episode, NoSuchPage, Routes

routes = Routes()
PER_PAGE = 10


def start(desk: Desk) -> State:
    """Everything in the inbox, tickets as they came."""
    mails = {f"mail/{m}": {"folder": "inbox", "star": False} for m in desk.mails}
    tickets = {
        f"ticket/{t.ident}": {"status": t.status, "priority": t.priority, "assignee": t.assignee}
        for t in desk.tickets.values()
    }
    return {**mails, **tickets}


def _mail(episode: Episode, ident: str) -> Mail:
    if ident not in episode.world.mails:
        raise NoSuchPage(f"There is no mail {ident}.")
    return episode.world.mails[ident]


def _ticket(episode: Episode, ident: str) -> Ticket:
    ticket = episode.world.tickets.get(ident)
    if ticket is None and f"ticket/{ident}" in episode.state:
        made = episode.state[f"ticket/{ident}"]
        return Ticket(
            ident=ident,
            subject=made["subject"],
            requester="you",
            day="2031-06-02",
            status=made["status"],
            priority=made["priority"],
            category=made["category"],
            assignee=made["assignee"],
        )
    if ticket is None:
        raise NoSuchPage(f"There is no ticket {ident}.")
    return ticket


@routes.get("/")
def home(episode: Episode, request: Request) -> Response:
    return see_other("/mail")


@routes.get("/mail")
def mailbox(episode: Episode, request: Request) -> Response:
    """A folder of mails, newest first, with search and pages."""
    folder = request.get("folder", "inbox")
    words = normal(request.get("q")).split()
    found = [
        m
        for m in episode.world.mails.values()
        if episode.state[f"mail/{m.ident}"]["folder"] == folder
        and all(w in normal(f"{m.sender} {m.subject}").split() for w in words)
    ]
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(max(1, whole(request.get("page"), 1)), pages)
    rows = [
        (
            "★" if episode.state[f"mail/{m.ident}"]["star"] else "",
            m.sender,
            e.a(m.subject, href=f"/mail/{m.ident}", id=f"mail-{m.ident}"),
            "📎" if m.attachment else "",
            m.day,
        )
        for m in found[(page - 1) * PER_PAGE : page * PER_PAGE]
    ]
    folders = [
        e.a(f.capitalize(), href=f"/mail?folder={f}", id=f"folder-{f}", cls="chip on" if f == folder else "chip")
        for f in FOLDERS
    ]
    search = e.form(
        hidden(folder=folder),
        e.input(type="search", name="q", id="q", value=request.get("q"), placeholder="Sender or subject", size=30),
        e.button("Search", id="search"),
        action="/mail",
        cls="row",
    )
    query = {"folder": folder, "q": request.get("q")}
    pager = [
        e.a(
            str(n),
            href="/mail?" + urlencode({**query, "page": n}),
            id=f"page-{n}",
            cls="chip on" if n == page else "chip",
        )
        for n in range(1, pages + 1)
    ]
    write = e.a("Write a mail", href="/write", id="write", cls="button")
    return episode.page(
        folder.capitalize(),
        e.div(e.h1(folder.capitalize()), write, cls="row"),
        e.p(folders),
        search,
        table(("", "From", "Subject", "", "Day"), rows) if rows else e.p("No mails here."),
        e.p(pager) if pages > 1 else None,
        here="mail",
    )


@routes.get("/mail/{ident}")
def mail(episode: Episode, request: Request, ident: str) -> Response:
    m = _mail(episode, ident)
    episode.see(f"mail:{ident}")
    now = episode.state[f"mail/{ident}"]

    def act(what: str, label: str) -> Any:
        form = e.button(label, id=what, name="what", value=what, cls="quiet")
        return e.form(form, method="post", action=f"/mail/{ident}/act")

    file = None
    if m.attachment:
        file = e.p("Attachment: ", e.a(m.attachment[0], href=f"/mail/{ident}/file", id="attachment"))
    return episode.page(
        m.subject,
        e.h1(m.subject),
        e.p(f"From {m.sender} <{address(m.sender)}>, {m.day}", cls="muted"),
        e.div(
            e.a("Reply", href=f"/write?reply={ident}", id="reply", cls="button"),
            e.a("Forward", href=f"/write?forward={ident}", id="forward", cls="button"),
            act("star", "Remove star" if now["star"] else "Star"),
            act("archive", "Archive"),
            act("trash", "Delete"),
            cls="row",
        ),
        e.div([e.p(p) for p in m.paragraphs], cls="card", id="text"),
        file,
        here="mail",
    )


@routes.post("/mail/{ident}/act")
def act(episode: Episode, request: Request, ident: str) -> Response:
    _mail(episode, ident)
    now = episode.state[f"mail/{ident}"]
    match request.sent("what"):
        case "star":
            episode.state[f"mail/{ident}"] = {**now, "star": not now["star"]}
            return see_other(f"/mail/{ident}")
        case "archive" | "trash" as folder:
            episode.state[f"mail/{ident}"] = {**now, "folder": folder}
    return see_other("/mail")


@routes.get("/mail/{ident}/file")
def attachment(episode: Episode, request: Request, ident: str) -> Response:
    m = _mail(episode, ident)
    if m.attachment is None:
        raise NoSuchPage("This mail has no attachment.")
    episode.see(f"attachment:{ident}")
    name, rows = m.attachment
    back = e.a("Back to the mail", href=f"/mail/{ident}", id="back")
    return episode.page(name, e.h1(name), table(("Item", "Amount"), rows, id="file"), e.p(back), here="mail")


@routes.get("/write")
def write(episode: Episode, request: Request) -> Response:
    to = subject = kind = origin = ""
    for word, prefix in (("reply", "Re: "), ("forward", "Fwd: ")):
        if request.get(word) in episode.world.mails:
            m = episode.world.mails[request.get(word)]
            kind, origin, subject = word, m.ident, prefix + m.subject
            to = address(m.sender) if word == "reply" else ""
    form = e.form(
        hidden(kind=kind, origin=origin),
        field("To", e.input(name="to", id="to", value=to, size=44), "to"),
        field("Subject", e.input(name="subject", id="subject", value=subject, size=44), "subject"),
        field("Text", e.textarea(name="text", id="text"), "text"),
        e.button("Send", id="send"),
        method="post",
        action="/send",
    )
    return episode.page("Write", e.h1("New mail" if not kind else kind.capitalize()), form, here="mail")


@routes.post("/send")
def send(episode: Episode, request: Request) -> Response:
    to, kind = request.sent("to").lower(), request.sent("kind")
    if to not in map(address, PEOPLE) or not (request.sent("text") or kind == "forward"):
        message = "The address must be that of a colleague (see Contacts), and the text must not be empty."
        return episode.page(
            "Not sent", e.p(message, cls="note"), e.a("Write again", href="/write", id="back"), here="mail"
        )
    n = 1 + sum(k.startswith("sent/") for k in episode.state)
    episode.state[f"sent/{n}"] = {
        "kind": kind,
        "origin": request.sent("origin"),
        "to": to,
        "subject": request.sent("subject"),
        "text": request.sent("text"),
    }
    done = e.a("Back to the mailbox", href="/mail", id="back")
    return episode.page("Sent", e.h1("Your mail was sent"), e.p(f"To {to}."), done, here="mail")


@routes.get("/contacts")
def contacts(episode: Episode, request: Request) -> Response:
    rows = [
        e.tr(e.td(e.a(p, href=f"/contacts/{i}", id=f"contact-{i}")), e.td(address(p))) for i, p in enumerate(PEOPLE)
    ]
    return episode.page("Contacts", e.h1("Contacts"), table(("Name", "Address"), rows, id="contacts"), here="contacts")


@routes.get("/contacts/{index}")
def contact(episode: Episode, request: Request, index: str) -> Response:
    if not 0 <= whole(index) < len(PEOPLE):
        raise NoSuchPage("There is no such contact.")
    person = PEOPLE[whole(index)]
    episode.see(f"contact:{person}")
    rows = [("Mail", address(person)), ("Phone", episode.world.phones[person])]
    return episode.page(person, e.h1(person), table(("", ""), rows, id="details"), here="contacts")


@routes.get("/tickets")
def tickets(episode: Episode, request: Request) -> Response:
    """All tickets that fit status, priority and assignee, in the chosen order."""
    wanted = {k: request.get(k) for k in ("status", "priority", "assignee")}
    order = request.get("sort", "number")
    rows = []
    every = [_ticket(episode, k.removeprefix("ticket/")) for k in episode.state if k.startswith("ticket/")]
    shown = sorted(every, key=lambda t: t.day if order == "age" else t.ident)
    for t in shown:
        now = episode.state[f"ticket/{t.ident}"]
        if all(v in ("", now[k]) for k, v in wanted.items()):
            link = e.a(t.subject, href=f"/tickets/{t.ident}", id=f"ticket-{t.ident}")
            rows.append(
                (t.ident, link, t.requester, now["status"], now["priority"], now["assignee"] or "nobody", t.day)
            )
    episode.see("tickets")

    def pick(name: str, label: str, values: tuple[str, ...]) -> Any:
        choices = [("", "any"), *((v, v) for v in values)]
        return e.label(f"{label} ", e.select(options(choices, wanted[name]), name=name, id=name))

    form = e.form(
        pick("status", "Status", STATUSES),
        pick("priority", "Priority", PRIORITIES),
        pick("assignee", "Assigned to", PEOPLE[:4]),
        e.label(
            "Sort by ", e.select(options((("number", "number"), ("age", "oldest")), order), name="sort", id="sort")
        ),
        e.button("Show", id="show"),
        action="/tickets",
        cls="row",
    )
    head = ("Number", "Subject", "Requester", "Status", "Priority", "Assigned to", "Opened")
    new = e.a("New ticket", href="/new", id="new", cls="button")
    return episode.page(
        "Tickets",
        e.div(e.h1("Tickets"), new, cls="row"),
        form,
        e.p(f"{len(rows)} tickets", id="count"),
        table(head, rows),
        here="tickets",
    )


@routes.get("/tickets/{ident}")
def ticket(episode: Episode, request: Request, ident: str) -> Response:
    t, now = _ticket(episode, ident), episode.state.get(f"ticket/{ident}", {})
    episode.see(f"ticket:{ident}")
    rows = [("Requester", t.requester), ("Category", t.category), ("Opened", t.day)]
    comments = [e.p(v, cls="card") for k, v in episode.state.items() if k.startswith(f"comment/{ident}/")]
    people = [("", "nobody"), *((p, p) for p in PEOPLE[:4])]
    form = e.form(
        field("Status", radios("status", [(s, s) for s in STATUSES], now["status"]), "status"),
        field("Priority", radios("priority", [(p, p) for p in PRIORITIES], now["priority"]), "priority"),
        field("Assigned to", e.select(options(people, now["assignee"]), name="assignee", id="assignee"), "assignee"),
        e.button("Save", id="save"),
        method="post",
        action=f"/tickets/{ident}",
        cls="card",
    )
    comment = e.form(
        field("Comment", e.textarea(name="text", id="text"), "text"),
        e.button("Add comment", id="add", cls="quiet"),
        method="post",
        action=f"/tickets/{ident}/comment",
    )
    title = f"{ident}: {t.subject}"
    return episode.page(
        title, e.h1(title), table(("", ""), rows, id="details"), form, comments, comment, here="tickets"
    )


@routes.post("/tickets/{ident}")
def save_ticket(episode: Episode, request: Request, ident: str) -> Response:
    _ticket(episode, ident)
    status, priority, assignee = (request.sent(k) for k in ("status", "priority", "assignee"))
    if status in STATUSES and priority in PRIORITIES and assignee in ("", *PEOPLE[:4]):
        old = episode.state[f"ticket/{ident}"]
        episode.state[f"ticket/{ident}"] = {**old, "status": status, "priority": priority, "assignee": assignee}
    return see_other(f"/tickets/{ident}")


@routes.post("/tickets/{ident}/comment")
def add_comment(episode: Episode, request: Request, ident: str) -> Response:
    _ticket(episode, ident)
    if request.sent("text"):
        n = 1 + sum(k.startswith(f"comment/{ident}/") for k in episode.state)
        episode.state[f"comment/{ident}/{n}"] = request.sent("text")
    return see_other(f"/tickets/{ident}")


@routes.get("/new")
def new(episode: Episode, request: Request) -> Response:
    form = e.form(
        field("Subject", e.input(name="subject", id="subject", size=44), "subject"),
        field("Category", radios("category", [(c, c) for c in CATEGORIES], "hardware"), "category"),
        field("Priority", radios("priority", [(p, p) for p in PRIORITIES], "normal"), "priority"),
        field("Reference", e.input(name="reference", id="reference", size=20), "reference"),
        e.button("Create ticket", id="create"),
        method="post",
        action="/new",
    )
    return episode.page("New ticket", e.h1("New ticket"), form, here="tickets")


@routes.post("/new")
def create(episode: Episode, request: Request) -> Response:
    subject, category, priority = (request.sent(k) for k in ("subject", "category", "priority"))
    if not subject or category not in CATEGORIES or priority not in PRIORITIES:
        return episode.page("New ticket", e.p("A subject is needed.", cls="note"), e.a("Back", href="/new", id="back"))
    ident = f"N{1 + sum(k.startswith('ticket/N') for k in episode.state)}"
    episode.state[f"ticket/{ident}"] = {
        "subject": subject,
        "category": category,
        "priority": priority,
        "reference": request.sent("reference"),
        "status": "open",
        "assignee": "",
    }
    return see_other(f"/tickets/{ident}")
