"""`keras-hpc migrate`: what becomes of scripts as Horovod's documentation shows them, and whether they train."""

import codecs
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT

from keras_hpc.tools.migrate.rules import NothingToDo, migrate

SCRIPTS = sorted((ROOT / "tests" / "migrate").glob("*.py"))


def _migrate(*words, cwd=ROOT):
    command = [sys.executable, "-m", "keras_hpc", "migrate", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


def _after(text):
    after, marks = migrate(text.encode(), "script.py")
    return after.decode(), [mark for _, mark in marks]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_of_the_documentation(script):
    done = _migrate(script.relative_to(ROOT))
    assert done.returncode == 0, done.stderr
    # Where a rule has changed: python -m keras_hpc migrate tests/migrate/X.py > tests/migrate/X.diff, and read it.
    assert done.stdout == script.with_suffix(".diff").read_text()
    marks = sum("+" in line[:1] and "# keras_hpc:" in line for line in done.stdout.splitlines())
    assert done.stderr.count(f"{script.relative_to(ROOT)}:") == marks


def test_there_are_scripts():
    assert len(SCRIPTS) == 4


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("fit_tensorflow", "tensorflow"),
        pytest.param("loop_tensorflow", "tensorflow", marks=pytest.mark.soak),
        pytest.param("loop_torch", "torch", marks=pytest.mark.soak),
    ],
)
def test_a_migrated_script_trains_on_two_ranks(name, backend, run_ranks, tmp_path):
    script = tmp_path / "train.py"
    script.write_text((ROOT / "tests" / "migrate" / f"{name}.py").read_text())
    assert _migrate("--write", script).returncode == 0
    assert "hvd" not in script.read_text()
    # Every rank must end with the same weights, whatever the script does.
    script.write_text(script.read_text().replace("keras_hpc.finalize()", ""))
    check = "\nimport os, keras_hpc as k\nk.check_replicas(model)\n"  # ranks' prints would mix
    check += "os.write(1, f'rank {k.rank()} of {k.size()} agrees\\n'.encode())\n"
    if name == "loop_tensorflow":
        check = check.replace("model", "train()[0]")
        script.write_text(script.read_text().replace('if __name__ == "__main__":\n    train()\n', ""))
    with script.open("a") as file:
        file.write(check)
    done = run_ranks(2, [script], backend=backend, timeout=120, cwd=tmp_path)  # it writes checkpoints
    assert "rank 0 of 2 agrees" in done.output
    assert "rank 1 of 2 agrees" in done.output
    if name == "fit_tensorflow":
        assert done.output.count("ranks 2 loss") == 1, "the first rank alone prints"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import horovod.keras\nhorovod.keras.init()\n", "import keras_hpc\nkeras_hpc.init()\n"),
        (
            "from horovod import keras as h\nh.init(); x = h.size()\n",
            "import keras_hpc\nkeras_hpc.init(); x = keras_hpc.size()\n",
        ),
        (
            "import horovod.keras as hvd\ncb = [hvd.callbacks.MetricAverageCallback(), a, b]\n",
            "import keras_hpc\ncb = [a, b]\n",
        ),
        (
            "import horovod.keras as hvd\ncb = [a, hvd.callbacks.MetricAverageCallback()]\n",
            "import keras_hpc\ncb = [a]\n",
        ),
        (
            "import horovod.keras as hvd\n"
            "cb = [\n    a,  # kept\n    hvd.callbacks.MetricAverageCallback(),  # exact\n    b,\n]\n",
            "import keras_hpc\ncb = [\n    a,  # kept\n    b,\n]\n",
        ),
        (
            "import horovod.keras as hvd\nif on:\n    opt = hvd.DistributedOptimizer(opt)\n",
            "import keras_hpc\nif on:\n    pass\n",
        ),
        (
            "import horovod.keras as hvd\nm.compile(hvd.DistributedOptimizer(SGD(0.1 * hvd.size()), name='ü'))\n",
            "import keras_hpc\nm.compile(SGD(0.1 * keras_hpc.size()))\n",
        ),
        (
            "import horovod.keras as hvd\ncb = [\n    # a\n    hvd.callbacks.MetricAverageCallback(),\n]\ncb.clear()\n",
            "import keras_hpc\ncb = []\ncb.clear()\n",
        ),
        (  # remarks on what is done no more, but not what others say, and no text
            "import horovod.keras as hvd\n# Of ours.\n# Horovod: begins,\n# at once.\nhvd.init()  # Horovod: here\n"
            't = """\n# Horovod: kept\n"""\n# With Horovod: kept\n',
            'import keras_hpc\n# Of ours.\nkeras_hpc.init()  # Horovod: here\nt = """\n# Horovod: kept\n"""\n'
            "# With Horovod: kept\n",
        ),
        (  # a session of TensorFlow 1, which Keras 3 does not have
            "import horovod.keras as hvd\nc = tf.ConfigProto()\nc.gpu_options.allow_growth = True\n"
            "c.gpu_options.visible_device_list = str(hvd.local_rank())\nK.set_session(tf.Session(config=c))\nx = 1\n",
            "import keras_hpc\nx = 1\n",
        ),
        (
            "import horovod.keras as hvd\nhvd.init()\nc = hvd.Compression.fp16 if a.half else hvd.Compression.none\n"
            "o = hvd.DistributedOptimizer(o, compression=c)\n",
            "import keras_hpc\nkeras_hpc.init()\n"
            'keras_hpc.configure_team(0, wire_dtype="float16" if a.half else None)\n',
        ),
        (
            "import horovod.keras as hvd\nhvd.init()\nc = hvd.Compression.none\n"
            "f(hvd.DistributedOptimizer(o, compression=c))\n",
            "import keras_hpc\nkeras_hpc.init()\nf(o)\n",
        ),
        (
            "import horovod.torch as hvd\nf(hvd.rank, key=hvd.size)\n",
            "import keras_hpc\nf(keras_hpc.rank, key=keras_hpc.size)\n",
        ),
    ],
)
def test_small_changes(before, after):
    assert _after(before) == (after, [])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x = x[hvd.rank() :: hvd.size()]; m.fit(x)", "init(shard=False)"),
        ("s = Sampler(d, num_replicas=hvd.size()); m.fit(d, sampler=s)", "init(shard=False)"),
        ("o = hvd.DistributedOptimizer(o, op=hvd.Sum)", "Horovod did: hvd.Sum"),
        ("o = hvd.DistributedOptimizer(o, backward_passes_per_step=8)", "gradient_accumulation_steps=8"),
        ("o = hvd.DistributedOptimizer(o, sparse_as_dense=True, process_set=p)", "process_set=p"),
        ("y = hvd.reducescatter(x)", "Horovod's averages"),
        ("y = hvd.allreduce(x, hvd.Sum)", "by position"),
        ("y = hvd.allreduce(x, prescale_factor=2.0)", "`prescale_factor` has no counterpart"),
        ("hvd.init(comm=[0, 1])", "configure_team(ranks=)"),
        ("epochs = 24 // hvd.size()", "fewer epochs"),
        ("hvd.start_timeline('x.json')", "takes the place of start_timeline"),
        ("hvd.run(main, np=4)", "keras-hpc run -n 4"),
        ("c = [hvd.callbacks.LearningRateScheduleCallback(0.1, 0.1, 30)]", "keras.callbacks.LearningRateScheduler"),
        ("c = hvd.Compression.fp16; hvd.init(); o = hvd.DistributedOptimizer(o, compression=c)", "compression is"),
        (
            "hvd.init(); c = hvd.Compression.fp16; o = hvd.DistributedOptimizer(o, compression=c); f(c)",
            "compression is",
        ),
        ("c = tf.ConfigProto(); c.gpu_options.visible_device_list = str(hvd.local_rank()); f(c)", "no sessions"),
        ("m.fit_generator(g)", "Keras 3 has fit"),
        ("o = keras.optimizers.SGD(lr=0.1)", "learning_rate"),
        ("from keras.preprocessing.image import ImageDataGenerator", "tensorflow.keras.preprocessing.image"),
        ("g = image.ImageDataGenerator()", "tensorflow.keras.preprocessing.image"),
    ],
)
def test_what_it_cannot_judge_is_marked(line, said):
    after, marks = _after(f"import horovod.keras as hvd\n{line}\n")
    assert any(said in mark for mark in marks), marks
    assert "# keras_hpc: " in after


def test_what_is_still_there_is_not_marked():
    lines = ("g = tf.keras.preprocessing.image.ImageDataGenerator()", "o = torch.optim.SGD(p, lr=0.1)", "m.fit(g)")
    assert _after("import horovod.keras as hvd\n" + "\n".join(lines) + "\n")[1] == []


def test_names_that_are_imported_alone_are_marked():
    _, marks = _after("import horovod.keras as hvd\nfrom horovod.keras import callbacks\nhvd.init()\n")
    assert marks[0].startswith("names of Horovod are imported one by one")


def test_a_byte_order_mark_stays_and_moves_nothing():
    before = codecs.BOM_UTF8 + b"import horovod.keras as hvd\nhvd.init()\n"
    assert migrate(before, "script.py")[0] == codecs.BOM_UTF8 + b"import keras_hpc\nkeras_hpc.init()\n"


def test_other_encodings_are_refused():
    """Places that ast tells are in UTF-8: changes would come a few bytes too late."""
    text = "# coding: latin-1\nimport horovod.keras as hvd\nx = 'é'; hvd.init()\n"
    for encoding in ("latin-1", "utf-8"):
        with pytest.raises(ValueError, match="a script in iso-8859-1"):
            migrate(text.encode(encoding), "script.py")


def test_a_script_that_cannot_be_written_stays(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import horovod.keras as hvd\nhvd.init()\n")
    (tmp_path / ".script.py.new").mkdir()  # what is written first
    done = _migrate("--write", script)
    assert done.returncode == 1
    assert "the script stays as it is" in done.stderr
    assert "horovod" in script.read_text()


def test_wrong_use_is_explained(tmp_path):
    script = tmp_path / "x.py"
    for text, said in (("import keras\n", "import horovod"), ("def\n", "cannot read"), (None, "no such script")):
        if text is not None:
            script.write_text(text)
        done = _migrate(script if text else tmp_path / "none.py")
        assert done.returncode != 0
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    with pytest.raises(NothingToDo):
        migrate(b"hvd.init()\n", "x.py")
    assert Path(script).read_text() == "def\n"
