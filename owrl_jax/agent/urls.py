"""Web addresses as models write them: `www.example.com`, ` http://x.org `, `/cart`, `javascript:…`.

`normalise` gives a full http or https address, or `about:blank`, or refuses with a sentence that teaches. It does not
ask whether an address may be visited: that is the sandbox's policy, and it is enforced at its egress.
"""

from __future__ import annotations

import re
from urllib.parse import urljoin, urlsplit

MAX_URL_CHARS = 8192
ALLOWED_SCHEMES = ("http", "https")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*):(.*)$", re.DOTALL)
_HOST_PORT = re.compile(r"^\d{1,5}(?:[/?#]|$)")
_LOCAL_HOST = re.compile(r"^(?:localhost|\d{1,3}(?:\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\])(?::|/|$)")


class BadUrl(ValueError):
    """Not an address that can be opened; the message says why and what would be right."""


def normalise(text: str, *, base_url: str | None = None) -> str:
    """The full address that `text` means.

    Args:
      text: what the policy wrote.
      base_url: the current page, for paths that begin with `/`, `?` or `#`.

    Raises:
      BadUrl: empty, too long, words instead of an address, or a scheme other than http and https.
    """
    # Browsers drop tabs and newlines anywhere in an address; so must whoever checks one.
    url = re.sub(r"[\t\r\n]", "", text).strip().strip("<>\"'")
    if not url:
        raise BadUrl("url is empty: give a full address such as https://example.com/.")
    if len(url) > MAX_URL_CHARS:
        raise BadUrl(f"url has {len(url)} characters; at most {MAX_URL_CHARS} are allowed.")
    if url.lower() == "about:blank":
        return "about:blank"
    if url.startswith("//"):
        url = "https:" + url
    elif url[0] in "/?#":
        if not base_url or not base_url.startswith(("http://", "https://")):
            raise BadUrl(f"{_show(url)} is only a path: give a full address such as https://example.com{url[:20]}.")
        url = urljoin(base_url, url)
    url = _with_scheme(url)
    return _checked(url)


def _with_scheme(url: str) -> str:
    match = _SCHEME.match(url)
    if match and not _HOST_PORT.match(match[2]):
        scheme = match[1].lower()
        if scheme not in ALLOWED_SCHEMES:
            raise BadUrl(f"addresses with {scheme}: cannot be opened, only http: and https: ({_show(url)}).")
        return f"{scheme}://{match[2].lstrip('/').lstrip(chr(92))}"
    # Local and numeric hosts rarely speak TLS; everything else does.
    return ("http://" if _LOCAL_HOST.match(url) else "https://") + url


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadUrl(f"{_show(url)} is not a valid address: {error}.") from None
    if not host or any(c.isspace() for c in parts.netloc):
        raise BadUrl(f"{_show(url)} is not an address: it has no host. Type search words into a search box instead.")
    if "." not in host and ":" not in host and host != "localhost" and port is None:
        raise BadUrl(
            f"{_show(url)} is not an address: {host!r} is no host name. Give one such as https://example.com/."
        )
    return url.replace(" ", "%20")


def _show(url: str, limit: int = 80) -> str:
    return repr(url if len(url) <= limit else url[: limit - 1] + "…")
