"""What walls say: one phrase a line. A space stands for any white space; the rest is a regular expression without case.

Words alone decide nothing; `blocks` weighs them with what else the page has.
"""

from __future__ import annotations

import re


def _phrases(table: str) -> str:
    return "|".join(line.strip().replace(" ", r"\s+") for line in table.strip().splitlines())


def _anywhere(table: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{_phrases(table)})", re.IGNORECASE)


# Whole titles of challenge pages; a site name may follow after a bar or dash.
_TITLES = _phrases(r"""
    just a moment
    attention required
    security (check|verification|challenge)
    checking your browser
    access (to this page has been )?denied
    are you (a )?(human|robot)
    (human|bot|robot) (verification|check)
    verify(ing)? (that )?you are (a )?human
    pardon our interruption
    one more step
    please wait
    ddos-guard
    captcha
    verification required
""")
CHALLENGE_TITLE = re.compile(rf"\s*(?:{_TITLES})[.…!?]*\s*(?:[|\-–·].*)?\Z", re.IGNORECASE)

CHALLENGE = _anywhere(r"""
    checking (if the site connection is secure|your browser before)
    verify(ing)? (that )?you(['’]re| are) (a )?(human|not a (ro)?bot)
    (confirm|prove|make sure|sure) (that )?you(['’]re| are) (a human|human|not a (ro)?bot)
    unusual (traffic|activity) from your
    complete the (security check|captcha|challenge)
    needs to review the security of your connection
    press (&|and) hold
    automated (access|requests|traffic|queries)
    you have been blocked
    request unsuccessful\. incapsula
    (i['’]m|i am) not a robot
    enable javascript and cookies to continue
    made us think (that )?you (were|are|might be) a (ro)?bot
    access (to this page has been|was|is) denied
    sind sie ein (mensch|roboter)
    êtes-vous un (humain|robot)
    ¿?(es|eres) (usted )?un (humano|robot)
""")

CAPTCHA = _anywhere(r"""
    captcha
    not a robot
    select all (images|squares)
    press (&|and) hold
    (type|enter) the (characters|letters|text) (you see|shown|below|in)
    slide to (verify|complete)
    drag the (slider|puzzle)
""")

LOGIN = _anywhere(r"""
    (log|sign) ?in (or (sign up|register|create an account) )?to (continue|view|see|access|read|proceed)
    (must|need to|have to|please) (be )?(log|sign)(ged|ed)? ?in
    (members|subscribers) only
    melden sie sich .{0,20}an,? um
    connectez-vous pour
    inicia sesión para
""")

GEO = _anywhere(r"""
    (not|n['’]t|no longer) (currently )?(available|accessible|supported) (in|from) your (country|region|location)
    (blocked|restricted|unavailable) in your (country|region|location)
    unavailable (in|due to) (the )?(european|eea|legal reasons|gdpr)
    in ihrem land nicht verfügbar
    pas disponible dans votre (pays|région)
    no está disponible en (tu|su) (país|región)
""")

CONSENT = _anywhere(r"""
    cookie
    consent
    privacy
    gdpr
    personal data
    einwilligung
    datenschutz
    données
    privacidad
""")

# Captions of anything that plausibly lets one through, or does something at all. A wall has none of it.
WAY_OUT = _anywhere(r"""
    accept|agree|allow|\bok\b|okay|got it|continue|close|dismiss|reject|decline|refuse|necessary|essential
    later|skip|no,? thanks|not now|\byes\b|confirm|save|×|✕|✖|icon
    akzeptieren|zustimmen|ablehnen|schließen|weiter
    accepter|refuser|fermer|continuer
    aceptar|rechazar|cerrar
""")
