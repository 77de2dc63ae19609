"""What buttons say when they buy, log in, open an account or post: one phrase a line, in four languages.

A phrase must be the whole caption; an amount, an arrow or "now" may follow. A space stands for any white space, and
the rest is a regular expression without case. Captions such as "How to place an order", "Sort order" or "Order history"
match nothing because nothing may stand before or after a phrase.
"""

from __future__ import annotations

import re

_YOUR = "( your| my| the| an?| this)?"
_PROVIDER = "(google|apple|facebook|microsoft|amazon|github|gitlab|linkedin|twitter|x|yahoo|a passkey|sso|paypal)"
_THING = (
    "(comment|review|reply|message|post|question|answer|feedback|rating|report|request|en?quiry|application|listing)"
)


def _captions(table: str) -> re.Pattern[str]:
    phrases = [line.strip().replace(" ", r"\s+") for line in table.strip().splitlines()]
    money = r"(?:[$€£¥]|usd|eur)?\s?[\d.,]*\s?(?:[$€£¥]|usd|eur)?"
    tail = rf"(?:\s+(?:now|jetzt|maintenant|ahora|securely|sicher))?[\s:–\-|·(]*{money}[\s)!.›»→>]*"
    return re.compile(rf"[\s›»→>]*(?:{'|'.join(phrases)}){tail}\Z", re.IGNORECASE)


# The last step of a purchase, whatever kind of element carries it.
ORDER = _captions(rf"""
    (place|submit|send|complete|confirm|finali[sz]e|finish){_YOUR} (\w+ )?(order|purchase|payment|booking|reservation)
    (place|submit) (the )?(order|bid|offer) (and|&) pay
    (confirm|review|agree|book|order|accept|continue|submit) (and|&) (pay|buy|purchase|order)
    pay (and|&) \w+
    make (a |the )?payment
    (buy|order) (it )?(now )?with (1|one)[\s-]click
    (jetzt )?(zahlungs|kosten)pflichtig (bestellen|buchen)
    (jetzt )?(verbindlich )?bestellung (aufgeben|abschließen|abschicken|absenden|bestätigen)
    (valider|confirmer|payer) (et payer|(la|ma|votre) commande)
    (realizar|confirmar|enviar|tramitar y pagar)( el| la| mi| su)? (pedido|compra|pago)
""")

# Purchases on a button; as links the same words lead to a product or a shop.
BUY = _captions(r"""
    buy( it| this)? now
    pay( (with|by) .{1,30})?
    (jetzt |sofort(\s*|-))kaufen
    (jetzt )?bezahlen
    acheter maintenant
    payer( (par|avec) .{1,30})?
    comprar (ya|ahora)
    pagar( con .{1,30})?
""")

# Purchases only at a checkout: elsewhere "Buy" and "Order now" are tabs ("Buy | Rent") or the way to a menu.
BUY_AT_CHECKOUT = _captions(r"""
    (buy|purchase|order|submit|confirm)( it| this)?
    (jetzt )?(kaufen|bestellen|zahlen|buchen)
    (acheter|commander|valider|confirmer)
    (comprar|pedir|confirmar)
""")

FEDERATED = _captions(rf"""
    (continue|sign ?-?in|signin|log ?-?in|login|sign ?-?up|signup|register|join) (with|using|via) {_PROVIDER}( account)?
    (mit|über) {_PROVIDER} (anmelden|fortfahren|registrieren)
    (continuer|se connecter|s['’]inscrire) avec {_PROVIDER}
    (continuar|iniciar sesión|registrarse) con {_PROVIDER}
""")

LOG_IN = _captions(r"""
    log(\s*|-)(in|on)
    sign(\s*|-)in
    anmelden
    einloggen
    se connecter
    connexion
    iniciar sesión
    acceder
    entrar
""")

SIGN_UP = _captions(rf"""
    sign(\s*|-)(me )?up( (for|to) .{{1,40}})?
    register
    create{_YOUR} (\w+ )?account
    join( now| us| free| for free)?
    get started
    subscribe( (to|for) .{{1,40}})?
    (jetzt )?(registrieren|abonnieren)
    konto (erstellen|anlegen)
    s['’](inscrire|abonner)
    créer (un|mon) compte
    registrarse
    regístrate
    crear (una |mi )?cuenta
    suscribirse
""")

# Posting that names its object: said by something that acts, unmistakable.
POST = _captions(rf"""
    (post|submit|send|publish|leave|share|add){_YOUR} (new )?{_THING}
    publish
    tweet
    send (email|e-mail|mail)
    veröffentlichen
    nachricht (senden|absenden|schicken)
    (kommentar|bewertung|anfrage|frage|antwort) (abschicken|absenden|senden|abgeben|veröffentlichen)
    publier
    (envoyer|publier) (le |la |mon |votre |un )?(message|commentaire|avis|demande)
    publicar
    (enviar|publicar) (el |la |mi |un )?(mensaje|comentario|reseña|consulta)
""")

# Posting only beside a text that has been written.
SEND = _captions(r"""
    (post|send|submit|reply|comment|share|ok|done|save)
    (senden|absenden|abschicken|antworten)
    (envoyer|répondre|commenter)
    (enviar|responder|comentar)
""")

# Captions inside a payment or login form that change something harmless and send nothing.
HARMLESS = re.compile(
    r"\b(?:coupon|promo|voucher|gutschein|discount|gift\s?card|apply(?!\s+(?:now|for))|guest|gast|invité|invitado"
    r"|update|quantity|remove|cancel|back|edit|filter|sort"
    r"|show|hide|forgot|reset|resend|estimate|calculate|add\s+to|in\s+den\s+warenkorb|ajouter|añadir"
    r"|check\s+availability|preview|close|discard)\b",
    re.IGNORECASE,
)
# "Write a review", "Add a comment": opens a form, posts nothing yet.
OPENS = re.compile(r"\b(?:add|write|leave|draft|compose|new)\b", re.IGNORECASE)


def _place(names: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|[/_.\- ])(?:{names})(?:[/_.\-? ]|$)", re.IGNORECASE)


# Path segments of pages made for signing in, paying and signing up.
LOGIN_PLACE = _place(
    "log-?in|log-?on|sign-?in|auth|authenticate|anmelden|anmeldung|connexion|iniciar-sesion|sso|identifier"
)
CHECKOUT_PLACE = _place("checkout|payment|pay|kasse|bezahlen|paiement|commande|pago|place-?order|order-?review|buy")
SIGNUP_PLACE = _place(
    "sign-?up|register|registration|registrieren|inscription|registro|join|create-?account|new-?account"
)
