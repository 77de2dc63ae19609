"""URL policy and address tables; the right answers come from the IANA registries, `ipaddress` and the URL standard."""

from __future__ import annotations

import contextlib
import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from owrl_jax.browser.addresses import BadHost, parse_host, private_reason
from owrl_jax.browser.policy import Refusal, UrlPolicy, registrable_domain, url_host_port
from owrl_jax.outcome import Owner, Reason

LOOPBACK = [
    *(
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0X7F.1",
        "0177.0.0.1",
        "017700000001",
        "127.0.0.1.",
    ),
    *(
        "%31%32%37.0.0.1",
        "127%2e0%2E0.1",
        "①②⑦.⓪.⓪.①",
        "127。0。0。1",
        "127｡0．0.1",
        "１２７.0.0.1",
        "0x7f.0x0.0x0.0x1",
    ),
    *("[::1]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::127.0.0.1]", "localhost"),
    *("LOCALHOST", "localhost.", "a.localhost", "loc\u00adalhost", "ｌｏｃａｌｈｏｓｔ", "localhost.localdomain"),
]


@pytest.mark.parametrize("host", LOOPBACK)
@pytest.mark.parametrize(
    "form", ["http://{}/", "https://{}:8443/x", "http://user:pw@{}/", "HTTP:\\\\{}\\", " ht\ntp://{}/\t"]
)
def test_every_spelling_of_this_machine_is_refused(host, form):
    refusal = UrlPolicy().check(form.format(host))
    assert refusal is not None and refusal.detail == "private_address"
    assert len(refusal.message) < 250 and "\n" not in refusal.message


@pytest.mark.parametrize(
    "url",
    [
        *("http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/", "http://metadata.google.internal/"),
        *("http://100.100.100.200/", "http://168.63.129.16/", "http://10.1.2.3", "http://172.31.255.255", "http://0/"),
        *("http://192.168.0.1", "http://100.64.0.1", "http://224.0.0.1", "http://255.255.255.255", "http://198.18.0.1"),
        *("http://[fe80::1]/", "http://[fc00::1]", "http://[ff02::1]", "http://[2002:0a00:1::]", "http://[2001::1]"),
        *("http://[::]", "http://[::10.0.0.1]", "http://[64:ff9b::a9fe:a9fe]", "http://printer.local/"),
        *("http://[2001:db8::1]", "http://0xa9fea9fe/", "http://0251.0376.0251.0376/", "http://2852039166/"),
        "http://[::ffff:a9fe:a9fe]/",
    ],
)  # fmt: skip
def test_private_and_metadata_addresses_are_refused(url):
    refusal = UrlPolicy().check(url)
    assert refusal is not None and refusal.detail == "private_address"


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/hostname", "chrome://crash", "view-source:http://example.com", "data:text/html,x", "FILE:/e"),
        *("javascript:alert(1)", "blob:http://example.com/1", "ftp://example.com", "devtools://x", "about:version"),
        *("chrome-extension://x/", "filesystem:http://a/b", " jAvAsCrIpT:alert(1)", "ws://example.com/", "mailto:a@b"),
        *("", "example.com", "//example.com", "http://", "http://[::1", "http://[fe80::1%25e]/", "http://256.1.1.1/"),
        *("http://1.2.3.4.5/", "http://0x7g.1/", "http://a b/", "http://example.com:99999/", "http://exa%00mple.com/"),
        *("http://08.1.1.1/", "http://a..b/", "http:///", "view-source:file:///etc/passwd", "about:blank.evil.com/"),
    ],
)  # fmt: skip
def test_other_schemes_and_broken_addresses_are_refused(url):
    refusal = UrlPolicy().check(url)
    assert refusal is not None and refusal.detail == "scheme"


@pytest.mark.parametrize(
    "url",
    [
        *("http://example.com", "https://example.com:8443/a?b#c", "about:blank", "http://93.184.215.14/", "HTTPS://E.de"),
        *("http://[2606:2800:220:1::1]/", "http://bücher.example/", "http://xn--bcher-kva.example/", "http://1e9.net"),
        *("http://127.0.0.1.nip.example/", "http://localhost.example.com/", "http://[64:ff9b::8.8.8.8]/"),
        *("http://user:pw@example.com/", "http://0xfoo.example/", "http://internal.example.com/", "about:srcdoc"),
    ],
)  # fmt: skip
def test_public_addresses_pass(url):
    assert UrlPolicy().check(url) is None


@given(st.integers(0, 2**32 - 1))
@example(int(ipaddress.IPv4Address("192.88.99.1")))
def test_no_special_ipv4_address_passes(number):
    ip = ipaddress.IPv4Address(number)
    if ip.is_multicast or ip.is_reserved or ip.is_loopback or ip.is_link_local or not ip.is_global:
        assert private_reason(ip)
    # The same address in its IPv6 clothes is judged alike; 6to4 and Teredo are refused altogether.
    assert bool(private_reason(f"::ffff:{ip}")) == bool(private_reason(ip))
    assert bool(private_reason(f"64:ff9b::{ip}")) == bool(private_reason(ip))
    assert private_reason(ipaddress.IPv6Address((0x2002 << 112) | (number << 80)))
    # Every numeric spelling means the same address.
    for text in (str(number), hex(number), "0" + oct(number)[2:], str(ip) + "."):
        assert parse_host(text) == ip


@given(st.integers(0, 2**128 - 1))
def test_no_special_ipv6_address_passes(number):
    ip = ipaddress.IPv6Address(number)
    if not ip.is_global or ip.is_multicast:
        assert private_reason(ip) or ip in ipaddress.IPv6Network("64:ff9b::/96")
    if private_reason(ip) is None:
        assert ip in ipaddress.IPv6Network("2000::/3") or ip in ipaddress.IPv6Network("::/16")


@given(st.text(max_size=40))
def test_any_text_is_answered(text):
    UrlPolicy().check(text)
    UrlPolicy().check("http://" + text)
    with contextlib.suppress(BadHost):
        parse_host(text)


def test_lists_match_domains_and_everything_below_them():
    policy = UrlPolicy(deny=frozenset({"www.Evil.example", "ads.shop.example"}))
    for url in (
        "http://evil.example",
        "https://a.b.evil.example:1/",
        "http://www.evil.example.",
        "http://ads.shop.example",
    ):
        assert policy.check(url).detail == "deny_list", url
    for url in ("http://notevil.example", "http://shop.example", "http://evil.example.com"):
        assert policy.check(url) is None, url
    policy = UrlPolicy(allow=frozenset({"shop.example"}))
    assert policy.check("http://www.shop.example/") is None
    assert policy.check("http://other.example/").detail == "deny_list"
    # An allow list does not open this machine.
    assert UrlPolicy(allow=frozenset({"127.0.0.1"})).check("http://127.0.0.1/").detail == "private_address"
    with pytest.raises(ValueError, match="not a host"):
        UrlPolicy(deny=frozenset({"http://evil.example/"}))


def test_exceptions_are_by_host_and_port_and_never_reach_metadata():
    policy = UrlPolicy(exceptions=frozenset({("127.0.0.1", 8000), ("*.world.localhost", 80), ("World.test", 80)}))
    assert policy.check("http://127.0.0.1:8000/x") is None
    assert policy.check("http://0x7f.1:8000/x") is None  # the same address, otherwise spelled
    assert policy.check("http://127.0.0.1:8001/") is not None
    assert policy.check("http://127.0.0.2:8000/") is not None
    assert policy.check("http://localhost:8000/") is not None  # another host, though the same machine
    assert policy.check("http://shop.world.localhost/") is None
    assert policy.check("http://world.localhost/") is not None
    assert policy.check_address("127.0.0.1", 80, "world.test") is None
    assert policy.check_address("127.0.0.1", 80, "evil.test").detail == "private_address"
    assert policy.check_address("127.0.0.1", 8000, "evil.test").detail == "private_address"  # rebinding onto the world
    assert policy.check_address("169.254.169.254", 80, "world.test").detail == "private_address"
    assert policy.check_address("93.184.215.14", 443, "example.com") is None
    for bad in (("127.0.0.1", 0), ("http://x", 80), ("127.0.0.1", 70000)):
        with pytest.raises(ValueError, match="exception"):
            UrlPolicy(exceptions=frozenset({bad}))


@pytest.mark.parametrize(
    ("host", "domain"),
    [
        ("www.shop.example.co.uk", "example.co.uk"),
        ("EXAMPLE.com.", "example.com"),
        ("a.github.io", "a.github.io"),  # a public suffix: its subdomains belong to different people
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("localhost", "localhost"),
        ("co.uk", "co.uk"),
        ("bücher.example", "xn--bcher-kva.example"),
    ],
)
def test_registrable_domain(host, domain):
    assert registrable_domain(host) == domain


def test_messages_carry_no_secret_and_no_template_token():
    refusal = UrlPolicy().check("ftp://user:hunter2@<|im_end|>.example/?token=abc")
    assert "hunter2" not in refusal.message and "abc" not in refusal.message and "<|im_end|>" not in refusal.message


def test_a_refusal_becomes_an_outcome():
    outcome = UrlPolicy().check("http://10.0.0.1/").outcome()
    assert (outcome.reason, outcome.detail, outcome.owner) == (Reason.POLICY_BLOCK, "private_address", Owner.POLICY)
    robots = Refusal(reason=Reason.BLOCKED, detail="robots", message="no")
    assert robots.outcome().owner == Owner.SITE
    with pytest.raises(ValueError, match="does not belong"):
        Refusal(detail="captcha", message="x")
    assert url_host_port("wss://EXAMPLE.com/x") == ("example.com", 443)
