"""Each event that the engine records, awaits or asks for is needed: without it, something is wrong that a test sees."""

import re

import device_orders
import pytest
from device_orders import SCENARIOS, is_right
from device_steps import fresh_driver
from launch import ROOT

ATTEMPTS = 10
# What asks the driver for order, and where: the places are known by the function of the driver.
OPERATIONS = {
    "cuEventRecord": r"(?:\.|->)record\(",
    "cuStreamWaitEvent": r"(?:\.|->)make_wait\(",
    "cuEventQuery": r"(?:\.|->)is_over\(",
    "cuStreamQuery": r"(?:\.|->)is_idle\(",
}


@pytest.fixture(autouse=True)
def fake():
    yield from fresh_driver()


def _written() -> dict[str, int]:
    """How often each is in the engine's source."""
    texts = [(ROOT / "native" / "device" / f"device_{name}.cpp").read_text() for name in ("plan", "call")]
    names = ("staged_plan", "direct_plan", "nccl_plan", "between_nodes", "peer_plan", "mpi_plan")
    texts += [(ROOT / "native" / "device" / f"{name}.cpp").read_text() for name in names]
    return {name: sum(len(re.findall(what, text)) for text in texts) for name, what in OPERATIONS.items()}


def test_each_event_is_needed(fake):
    """All that is in the source is reached; what is reached is left out, one place at a time, until it is missed."""
    fake.fake_watch(1)
    reached: dict[str, list] = {}
    try:
        for scenario in SCENARIOS:
            fake.fake_watch(1)
            assert is_right(scenario), scenario.__name__
            for site in device_orders.sites():
                reached.setdefault(site, []).append(scenario)
        for name, count in _written().items():
            assert count > 0
            assert sum(site.startswith(f"{name} in ") for site in reached) >= count, sorted(reached)
        unmissed = [site for site, scenarios in sorted(reached.items()) if not _is_missed(fake, site, scenarios)]
        assert unmissed == []
    finally:
        fake.fake_ignore(b"")
        fake.fake_watch(0)
        fake.fake_reset(2, 0)


def _is_missed(fake, site, scenarios) -> bool:
    for _ in range(ATTEMPTS):
        for scenario in scenarios:
            fake.fake_ignore(site.encode())
            right = is_right(scenario)
            assert fake.fake_ignore(b"") > 0, f"{site} was not left out in {scenario.__name__}"
            if not right:
                return True
    return False
