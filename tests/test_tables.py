"""Tables of the command line: plain text into files and pipes, by rich on a terminal."""

import os
import pty
import re
import subprocess
import sys

import pytest
from launch import child_environment

from keras_hpc.tools import tables

SIZES = "--ranks 4 --samples 1000 --batch-size 8 --parameters 1000000 --sample-bytes 1000"
PLAN = [*SIZES.split(), "--step-ms", "50", "--gb-per-s", "1"]
ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def _on_a_terminal(*words):
    """What a command prints on a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    env = child_environment("torch") | {"TERM": "xterm-256color", "COLUMNS": "100"}
    env = {name: value for name, value in env.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen([sys.executable, "-m", "keras_hpc", *words], stdout=theirs, env=env)
    os.close(theirs)
    said = b""
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # nobody has the other end any more
            break
        if not read:
            break
        said += read
    os.close(ours)
    assert process.wait(60) == 0, said
    return said.decode().replace("\r\n", "\n")


def _show():
    tables.pairs({"path": "/a[b]/c", "cores": "0-3"}, "installation")
    grid = tables.Grid([tables.Column("rank", right=True), tables.Column("host", 6)], "ranks")
    grid.show([("0", "node-one"), ("1", "two")])
    grid.show([("10", "three")])
    tables.hints(["a [slow] link"])


def test_plain_text_is_for_programs(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    _show()
    assert capsys.readouterr().out.splitlines() == [
        "installation",
        "  path                  /a[b]/c",
        "  cores                 0-3",
        "ranks",
        "  rank  host",
        "     0  node-one",
        "     1  two",
        "    10  three",
        "hint: a [slow] link",
    ]


def test_rich_has_the_same_words(capsys, monkeypatch):
    pytest.importorskip("rich", reason="Keras brings it")
    _show()
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    _show()
    shown = capsys.readouterr().out
    assert ESCAPE.search(shown)
    assert ESCAPE.sub("", shown).split() == plain.split()


def test_without_rich_a_terminal_gets_plain_text(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    _show()
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.mpi
def test_a_terminal_gets_rich_tables():
    pytest.importorskip("rich", reason="Keras brings it")
    said = _on_a_terminal("plan", *PLAN)
    assert ESCAPE.search(said)
    assert re.search(r"^steps of an epoch +32, in ", ESCAPE.sub("", said), re.M)
    said = _on_a_terminal("bench", "--bytes", "256,4Ki", "--seconds", "0.05")
    assert ESCAPE.search(said), "ranks do not see the terminal themselves"
    assert re.search(r"^ +bytes +path +keras_hpc us ", ESCAPE.sub("", said), re.M)
    assert len(re.findall(r"^ +(256|4096) +(private|segment|fusion) ", ESCAPE.sub("", said), re.M)) == 6
