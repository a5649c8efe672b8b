"""Kills ranks of elastic jobs from outside, at any moment, and whole hosts."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from launch import ROOT, TOKEN, child_environment

TRAIN = ROOT / "tests" / "ranks" / "train_virtual.py"
_SECONDS = 180


@dataclass
class Story:
    """What an elastic job has said, and when.

    Attributes:
        lines: with the seconds since it was started.
        killed: when ranks were killed, in the same seconds.
        status: with which it has ended.
    """

    lines: list[tuple[float, str]] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)
    status: int | None = None

    @property
    def text(self):
        return "".join(f"{seconds:6.1f} {line}\n" for seconds, line in self.lines)

    def when(self, pattern):
        """When lines came that match."""
        return [seconds for seconds, line in self.lines if re.search(pattern, line)]

    @property
    def digests(self):
        assert self.status == 0, self.text
        return {json.loads(line)["digest"] for _, line in self.lines if line.startswith("{")}


def watch(command, environment, meddle=None):
    """Runs a command, and returns its story; `meddle(story, token)` runs beside it in a thread."""
    token = secrets.token_hex(8)
    story, began = Story(), time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment | {TOKEN: token},
        cwd=ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    story.began = began
    limit = threading.Timer(_SECONDS, process.terminate)
    limit.start()
    if meddle is not None:
        threading.Thread(target=meddle, args=(story, token), daemon=True).start()
    for line in process.stdout:
        story.lines.append((time.monotonic() - began, line.rstrip("\n")))
    story.status = process.wait()
    limit.cancel()
    return story


def elastic(ranks, *words, backend, meddle=None, options=()):
    """Runs `keras_hpc run --elastic`, and returns its story."""
    command = [sys.executable, "-m", "keras_hpc", "run", "--elastic", *options, "-n", str(ranks), "--no-label"]
    return watch([*command, *map(str, words)], child_environment(backend, lean=True), meddle)


def ranks_of(token):
    """The processes that are ranks of a job, as it is now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # it has ended, or is another user's
                continue
            if f"{TOKEN}={token}".encode() in environment and b"PMI_RANK=" in environment:
                found.append(int(entry.name))
    return found


def killer(moments, source):
    """What kills one rank, by chance, at each of some moments.

    `moments`: seconds since the start, or since the line that a pattern matches: (pattern, seconds).
    """

    def meddle(story, token):
        for moment in moments:
            pattern, seconds = moment if isinstance(moment, tuple) else ("", moment)
            while pattern and not story.when(pattern) and story.status is None:
                time.sleep(0.01)
            if story.status is not None:
                return
            due = seconds + (story.when(pattern)[-1] if pattern else 0.0)
            while (time.monotonic() - story.began < due or not ranks_of(token)) and story.status is None:
                time.sleep(0.01)
            if story.status is None and (there := ranks_of(token)):
                try:
                    os.kill(source.choice(there), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                story.killed.append(time.monotonic() - story.began)

    return meddle
