"""The audit log: what is written, what is not, and what a full disk does to it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from owrl_jax.browser import audit as audit_module
from owrl_jax.browser.audit import AuditLog, read_audit
from owrl_jax.browser.egress_gate import EgressEvent


def event(host="shop.example", verdict="allowed", **fields) -> EgressEvent:
    return EgressEvent(
        **{"time": 5.0, "episode": "e1", "host": host, "port": 443, "tunnel": True, "verdict": verdict} | fields
    )


def test_a_host_is_written_when_first_met_and_summed_up_at_the_end(tmp_path):
    log = AuditLog(tmp_path / "a" / "audit.jsonl", clock=lambda: 9.0)
    for _ in range(3):
        log.on_event(event())
        log.on_event(event(verdict="closed", sent=10, received=100, status=200))
    log.on_event(event("evil.example", "refused", detail="private_address"))
    rows = list(read_audit(log.path))  # before anything is finished: a crash here loses no host
    assert [(r["host"], r["verdict"], r["time"]) for r in rows] == [
        ("shop.example", "allowed", 5.0),
        ("evil.example", "refused", 5.0),
    ]
    log.finish("e1")
    log.finish("e1")
    totals = list(read_audit(log.path))[2:]
    assert totals[0] == {"time": 9.0, "episode": "e1", "host": "shop.example", "port": 443, "verdict": "allowed",
                         "total": True, "count": 3, "sent": 30, "received": 300, "statuses": {"200": 3}}  # fmt: skip
    assert totals[1]["detail"] == "private_address" and totals[1]["count"] == 1 and len(totals) == 2
    log.close()
    log.close()


def test_closing_writes_what_is_open_and_appending_keeps_what_was_there(tmp_path):
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        log = AuditLog(path, fsync="always")
        log.on_event(event())
        log.close()
    assert len(list(read_audit(path))) == 4
    assert oct(path.stat().st_mode & 0o777) == "0o640"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_a_flag_and_not_an_exception():
    faults = []
    log = AuditLog("/dev/full", on_fault=faults.append)
    for k in range(3):
        log.on_event(event(f"h{k}.example"))
    assert log.lost == 3 and log.fault.detail == "disk_full" and "Free space" in log.fault.message
    assert faults == [log.fault] or [f.detail for f in faults] == ["disk_full"]
    log.close()


def test_after_a_torn_line_the_next_one_is_whole(tmp_path, monkeypatch, caplog):
    log = AuditLog(tmp_path / "audit.jsonl")
    real = os.write
    monkeypatch.setattr(audit_module.os, "write", lambda fd, data: real(fd, data[:17]))
    log.record("e1", host="a.example", port=80, verdict="allowed")
    assert log.fault.detail == "disk_full" and log.lost == 1
    monkeypatch.setattr(audit_module.os, "write", real)
    log.record("e1", host="b.example", port=80, verdict="allowed")
    assert log.fault is None and log.lost == 1  # space is back
    log.close()
    assert [row["host"] for row in read_audit(log.path)] == ["b.example"]
    assert "torn" in caplog.text


def test_an_error_of_the_disk_is_told_once(tmp_path, monkeypatch):
    faults = []
    log = AuditLog(tmp_path / "audit.jsonl", on_fault=faults.append)

    def fail(fd: int, data: bytes) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(audit_module.os, "write", fail)
    for _ in range(4):
        log.record("e1", host="a.example", port=80, verdict="allowed")
    assert [f.detail for f in faults] == ["unknown"] and log.lost == 4
    monkeypatch.undo()
    log.close()


def test_lines_of_several_processes_do_not_mix(tmp_path):
    path = tmp_path / "audit.jsonl"
    code = (
        "import sys; from owrl_jax.browser.audit import AuditLog\n"
        "log = AuditLog(sys.argv[1], fsync='never')\n"
        "for k in range(300): log.record(sys.argv[2], host='h' * 500, port=k or 1, verdict='allowed')\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), f"e{k}"]) for k in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    lines = path.read_bytes().splitlines()
    assert len(lines) == 900 and {json.loads(line)["episode"] for line in lines} == {"e0", "e1", "e2"}
