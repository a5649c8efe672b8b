"""What a job knows of models, while threads of the user's own train other ones."""

import threading
import time

from keras_hpc.job.model_state import Known


class Owner:
    """A model, optimizer or layer."""


def test_threads_may_add_models_while_others_look_at_all():
    known, done, failed = Known(), threading.Event(), []
    owners = [Owner() for _ in range(20000)]  # so many that others get their turn while they are looked at

    def add(owner):
        known.model(owner), known.optimizer(owner), known.keep_local(owner)

    def look():
        try:
            while not done.is_set():
                known.models(), known.optimizers(), known.local_layers()
        except RuntimeError as error:
            failed.append(error)

    for owner in owners:
        add(owner)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(50):
            time.sleep(0.001)
            owners.append(owner := Owner())
            add(owner)
    finally:
        done.set()
        thread.join()
    assert not failed
    assert [owner for owner, _ in known.models()] == owners
    del owners[1:], owner
    assert [len(found) for found in (known.models(), known.optimizers(), known.local_layers())] == [1, 1, 1]
