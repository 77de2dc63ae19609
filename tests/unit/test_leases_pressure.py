"""The pressure gauge: smoothing by the formula, hysteresis, and the host that is never refused its first episode."""

import math

import pytest

from owrl_jax.pool.pressure import Load, PressureConfig, PressureGauge, host_load


class Script:
    """A host whose load and clock the test turns."""

    def __init__(self, cpu=0.0, mem=0.1):
        self.cpu, self.mem, self.now = cpu, mem, 0.0

    def gauge(self, **config):
        return PressureGauge(PressureConfig(**config), source=self.load, clock=lambda: self.now)

    def load(self):
        return Load(cpu=self.cpu, mem=self.mem, mem_total_mib=1000.0)


def test_processor_share_is_an_exponential_average():
    host = Script(cpu=0.0)
    gauge = host.gauge(tau_s=4.0)
    host.cpu = 1.0
    for _ in range(6):
        host.now += 0.5
        gauge.sample()
    assert gauge.cpu_ema == pytest.approx(1.0 - math.exp(-3.0 / 4.0)), "3 s of a unit step through a 4 s filter"


def test_refusal_starts_high_and_ends_low():
    host = Script()
    gauge = host.gauge(mem_high=0.9, mem_low=0.8, cpu_high=2.0, cpu_low=2.0)
    answers = []
    for mem in (0.85, 0.91, 0.85, 0.81, 0.79, 0.85):
        host.mem = mem
        gauge.sample()
        answers.append(gauge.refusal(running=3))
    assert answers == ["", "memory", "memory", "memory", "", ""]


def test_an_idle_host_admits_one_whatever_others_do():
    host = Script(cpu=1.0, mem=0.99)
    gauge = host.gauge()
    gauge.sample()
    assert gauge.refusal(running=0) == "" and gauge.refusal(running=1) == "memory"


def test_a_threshold_of_one_switches_the_rule_off():
    host = Script(cpu=1.0)
    gauge = host.gauge(cpu_high=1.0, cpu_low=1.0)
    gauge.sample()
    assert gauge.refusal(running=9) == ""


def test_reading_says_why_and_forgets_old_rejections():
    host = Script()
    gauge = host.gauge()
    gauge.rejected()
    host.now = 50.0
    gauge.rejected()
    assert gauge.reading(running=2, queued=1, full=True).rejected_recently == 2
    host.now = 70.0
    reading = gauge.reading(running=2, queued=1, full=True)
    assert (reading.available, reading.reason, reading.rejected_recently) == (False, "full", 1)
    assert gauge.reading(running=0, queued=0, full=False).available


@pytest.mark.parametrize("bad", [{"cpu_low": 0.99, "cpu_high": 0.9}, {"mem_low": 0.0}, {"tau_s": 0.0}])
def test_thresholds_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="got"):
        PressureConfig(**bad)


def test_the_host_answers_with_shares():
    load = host_load()
    assert 0.0 <= load.cpu <= 1.0 and 0.0 < load.mem < 1.0 and load.mem_total_mib > 64
