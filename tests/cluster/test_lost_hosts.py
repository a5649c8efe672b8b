"""Elastic jobs on several hosts lose one of them, its memory included: nothing is lost, and the bits stay the same."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kills import TRAIN, watch
from launch import child_environment

from benchmarks.hosts import Hosts, HostsError

pytestmark = [pytest.mark.mpi, pytest.mark.soak]

_BEGINS = r"steps an epoch; \d rank"


def lose(hosts, name):
    """Ends all that runs on a host, and takes its memory; it does not answer until what is returned is called."""
    file = Path(hosts.agent).parent / name
    entry = file.read_text()
    file.write_text("")
    keeper = int(entry.split()[0])
    space = os.readlink(f"/proc/{keeper}/ns/uts")
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(process) != keeper and os.readlink(f"/proc/{process}/ns/uts") == space:
                os.kill(int(process), signal.SIGKILL)
        except OSError:  # it has ended
            continue
    subprocess.run(["nsenter", "-t", str(keeper), "--mount", "sh", "-c", "rm -rf /dev/shm/*"], check=True)
    return lambda: file.write_text(entry)


def run(hosts, words, meddle=None):
    command = [sys.executable, "-m", "keras_hpc", "run", *words, "--hosts", "host1:2,host2:2", "--no-label"]
    command += [str(TRAIN), "/dev/shm/run", "5", "0.2"]
    environment = child_environment("torch", hosts.environment, lean=True)
    del environment["PRTE_MCA_rmaps_default_mapping_policy"]  # it would put all ranks on the first host
    return watch(hosts.on_head(command), environment, meddle)


@pytest.mark.parametrize("lost", ["host1", "host2"])
def test_a_host_that_is_lost_and_comes_back(lost):
    try:
        with Hosts(2) as hosts:
            (expected,) = run(hosts, []).digests
        with Hosts(2) as hosts:

            def meddle(story, token):
                while not story.when(_BEGINS):
                    time.sleep(0.05)
                time.sleep(2)  # with some checkpoints
                back = lose(hosts, lost)
                story.killed.append(time.monotonic() - story.began)
                threading.Timer(2, back).start()

            story = run(hosts, ["--elastic", "--rejoin"], meddle)
    except HostsError as why:
        pytest.skip(str(why))
    assert story.digests == {expected}, story.text
    assert len(story.when("the ranks of each node write a whole one")) == 2, story.text
    assert len(story.when("starts again with 2")) == 1, story.text
    assert len(story.when("lost ranks join again.* starts again with 4")) == 1, story.text
    assert len(story.when("goes on from /dev/shm/run/step-")) == 2, "of what the other host has kept"
    again = story.when(_BEGINS)[1] - story.killed[0]
    sys.stdout.write(f"{lost} lost: trained again {again:.1f} s later\n{story.text}")
    assert again < 15
