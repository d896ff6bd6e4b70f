"""The measurement of a copy, with a clock of its own and small arrays."""

import jax
import numpy as np
import pytest

import fusedopt
from fusedopt.reports import bandwidth

SMALL = 2**14


class Clock:
    """Moves on by what the copies say that they take."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def fake(monkeypatch, table, seconds):
    """Copies of 8 bytes a number that take turns, each with times of its own. The clock."""
    clock, log = Clock(), []

    class Copy:
        def __init__(self, name, size):
            self.name, self.bytes, self.times = name, 8 * size, iter(seconds[name])
            self.last = None

        def run(self, steps):
            self.last = next(self.times, self.last)
            log.append((self.name, steps))
            clock.now += steps * self.last

    monkeypatch.setattr(bandwidth, table, {name: lambda size, name=name: Copy(name, size) for name in seconds})
    return clock, log


def test_the_fastest_way_by_its_median(monkeypatch):
    # The first two runs set up; then nine samples, of which some are slow.
    slow = [5.0, 0.01, *[0.010] * 9]
    fast = [5.0, 0.005, *[0.004] * 5, *[0.5] * 4]
    clock, log = fake(monkeypatch, "ON_HOST", {"slow": slow, "fast": fast})
    measured = bandwidth.measure(size=1000, clock=clock)
    assert measured.way == "fast"
    assert measured.bytes_per_second == pytest.approx(8000 / 0.004)
    # In turns, and as many steps as last 20 ms by the second run.
    assert log[4:8] == [("slow", 2), ("fast", 4), ("slow", 2), ("fast", 4)]
    assert len(log) == 2 * (2 + bandwidth.ROUNDS)


def test_other_devices_are_measured_with_programs_alone(monkeypatch):
    clock, _ = fake(monkeypatch, "ON_DEVICE", {"copy": [0.001]})
    monkeypatch.setattr(bandwidth.jax, "default_device", lambda device: jax.numpy_rank_promotion("raise"))
    measured = bandwidth.measure("gpu", size=1000, clock=clock)
    assert measured.bytes_per_second == pytest.approx(8000 / 0.001)


@pytest.mark.parametrize("way", [*bandwidth.ON_HOST.values(), *bandwidth.ON_DEVICE.values()])
def test_every_way_reads_and_writes_what_it_says(way):
    copy = way(size=SMALL)
    assert copy.bytes == 8 * SMALL
    copy.run(2)
    if isinstance(copy, bandwidth.HostCopy):
        for target, source in zip(*copy._parts):
            np.testing.assert_array_equal(target, source)
    else:
        value = 2.0 if copy.donate else 0.0
        np.testing.assert_array_equal(copy.array, np.full(SMALL, value))


def test_a_report_measures_where_its_parameters_are(monkeypatch):
    asked = []
    monkeypatch.setattr(bandwidth, "measure", lambda device: asked.append(device) or bandwidth.Bandwidth(1e9, "copy"))
    third = jax.devices()[3]
    params = {"w": jax.device_put(np.ones(4, np.float32), third)}
    fusedopt.report(fusedopt.sgd(0.1), params).measure_bandwidth()
    fusedopt.report(fusedopt.sgd(0.1), {"w": jax.ShapeDtypeStruct((4,), np.float32)}).measure_bandwidth()
    fusedopt.report(fusedopt.sgd(0.1), params, device=jax.devices()[1]).measure_bandwidth()
    assert asked == [third, None, jax.devices()[1]]


def test_a_real_measurement_is_positive():
    rate, way = bandwidth.measure(size=SMALL)
    assert 1e6 < rate < 1e13
    assert way in bandwidth.ON_HOST
