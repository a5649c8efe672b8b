"""What is said beside simulated numbers: how near the simulator came, exposed time included."""

import pytest

from benchmarks import page, validation

ROWS = [
    {"hosts": 2, "mbit": 200, "latency_us": 25.0, "together_gb_per_s": 1.5, "what": "4,096 bytes", "nbytes": 4096}
    | {"measured_ms": 0.4, "simulated_ms": 0.3},
    {"hosts": 2, "mbit": 200, "latency_us": 25.0, "together_gb_per_s": 1.5, "what": "a step", "compute_ms": 100.0}
    | {"measured_ms": 110.0, "simulated_ms": 105.0, "measured_exposed_ms": 10.0, "simulated_exposed_ms": 5.0},
    {"hosts": 8, "mbit": 0, "latency_us": 90.0, "together_gb_per_s": 1.25, "what": "a step", "compute_ms": 100.0}
    | {"measured_ms": 200.0, "simulated_ms": 100.0, "measured_exposed_ms": 100.0, "simulated_exposed_ms": 100.0},
]


def test_errors_of_steps_and_of_exposed_time():
    assert validation.error(ROWS[1]) == pytest.approx(-5 / 110)
    assert validation.error(ROWS[1], "exposed_ms") == pytest.approx(-0.5)
    said = validation.summary(ROWS)
    assert "on up to 8 hosts, 1 of 2 steps are within 10% (error -50.0% to -4.5%)" in said
    assert "of exposed time 1 are (-50% to +0%)" in said


def test_the_page_says_them_beside_each_row():
    table = page.validation_table(ROWS).splitlines()
    assert table[2].endswith("| 0.40 | 0.30 | -25.0% |  |  |")
    assert table[3].endswith("| 110.00 | 105.00 | -4.5% | 10.0 / 5.0 | -50% |")
    assert "| no limit | 90 | 1.25 |" in table[4]
