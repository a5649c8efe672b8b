# SPDX-License-Identifier: Apache-2.0
"""What becomes of each name of Horovod.

Only the text of the script is read, nothing of it is run.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence

from keras_hpc.tools.migrate import leftovers
from keras_hpc.tools.migrate.edits import Source
from keras_hpc.tools.migrate.names import (
    BROADCAST,
    COMPRESSION,
    FIRST_RANK_ONLY,
    HARMLESS,
    INSTEAD,
    KNOWN_KEYWORDS,
    MODULES,
    OPS,
    OPTIMIZER_STATE,
    SAME,
)
from keras_hpc.tools.migrate.script import Script

MARK = "keras_hpc:"


class NothingToDo(Exception):
    """The script does not import Horovod in a way that we know."""


def migrate(text: bytes, name: str) -> tuple[bytes, list[tuple[int, str]]]:
    """Take Horovod out of a script.

    Args:
        text: of the script, UTF-8.
        name: of its file, for errors.

    Returns:
        The new text, and what to look at: lines of the new text, from 1, and what is to be done there.

    Raises:
        SyntaxError: Python cannot read it.
        ValueError: it is not in UTF-8.
        NothingToDo: there is nothing of Horovod in it.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(text).readline)
    if encoding not in ("utf-8", "utf-8-sig"):
        raise ValueError(f"a script in {encoding}")
    text.decode()
    source = Source(text, name)
    found = _Changes(source)
    if not found.names:
        raise NothingToDo("Expected a script with `import horovod... as ...`")
    found.change()
    after = source.result()
    ast.parse(after, f"{name} without Horovod")
    marks = [
        (number, line.strip().removeprefix(f"# {MARK}").strip())
        for number, line in enumerate(after.decode().splitlines(), 1)
        if line.strip().startswith(f"# {MARK}")
    ]
    return after, marks


class _Changes(Script):
    """What is changed in a script."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._marked: set[tuple[int, str]] = set()
        self._gone: set[ast.AST] = set()
        self._compression: str | None = None  # a name that has become a call of configure_team
        calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
        self._has_loop = any(self.name(call.func) == "DistributedGradientTape" for call in calls)
        self._has_fit = any(isinstance(call.func, ast.Attribute) and call.func.attr == "fit" for call in calls)
        self._scaled = {}  # names that are a learning rate times size(), for a warm-up that multiplies itself
        for call in calls:
            if self.name(call.func) == "callbacks.LearningRateWarmupCallback":
                rate = next((k.value for k in call.keywords if k.arg == "initial_lr"), None)
                rate = rate or (call.args[0] if call.args else None)
                if isinstance(rate, ast.Name):
                    self._scaled[rate.id] = False

    def change(self) -> None:
        self._change_imports()
        for first, last in leftovers.remarks(self._source.text):
            self._source.remove_lines(first, last)
        self._compression = self._change_compression()
        for node in ast.walk(self._source.tree):
            if any(parent in self._gone for parent in self.above(node)):
                continue
            if isinstance(node, ast.If):
                self._change_if(node)
            elif isinstance(node, ast.Assign):
                self._change_assignment(node)
            elif isinstance(node, ast.List):
                self._change_list(node)
            elif isinstance(node, ast.Expr):
                self._change_statement(node)
            elif isinstance(node, ast.BinOp):
                self._change_division(node)
            elif self._has_fit and self.takes_part_of_data(node):
                self._mark(node, "fit shares data out itself: give it all data, or call init(shard=False)")
        for node in ast.walk(self._source.tree):
            if any(parent in self._gone for parent in [node, *self.above(node)]):
                continue
            if said := leftovers.of_keras_2(node):
                self._mark(node, said)
            if isinstance(node, ast.Call):
                self._change_call(node)
            elif isinstance(node, ast.Attribute | ast.Name):
                self._change_other_use(node)

    def _change_imports(self) -> None:
        source = self._source
        first = True
        for node in dict.fromkeys(self._imports):
            if isinstance(node, ast.ImportFrom) and not any(alias.name in MODULES for alias in node.names):
                self._mark(node, "names of Horovod are imported one by one: write them as hvd.NAME, and try again")
                continue
            if isinstance(node, ast.Import) and len(node.names) > 1:
                kept = [alias for alias in node.names if alias.name.split(".")[0] != "horovod"]
                text = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in kept)
                source.replace(node, f"import {text}\nimport keras_hpc" if kept else "import keras_hpc")
            elif first:
                source.replace(node, "import keras_hpc")
            else:
                source.remove_statement(node, self._block_of(node))
            self._gone.add(node)
            first = False

    def _change_compression(self) -> str | None:
        """Tell the team in the place of `compression = hvd.Compression.fp16 if ...`, and return the name."""
        begun = next((n for n in ast.walk(self._source.tree) if self.is_call(n, "init")), None)
        for node in ast.walk(self._source.tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name) or begun is None:
                continue
            name, value = node.targets[0].id, node.value
            choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            chosen = [self.name(one) for one in choices]
            if not all(one in ("Compression.fp16", "Compression.none") for one in chosen):
                continue
            uses = [n for n in ast.walk(self._source.tree) if isinstance(n, ast.Name) and n.id == name]
            options = [n for n in uses if isinstance(up := self._parents[n], ast.keyword) and up.arg == "compression"]
            if len(uses) != len(options) + 1 or self.above(node)[0] is not self.above(self.statement_of(begun))[0]:
                continue
            if self._source.begin(node) < self._source.begin(begun):
                continue
            types = ['"float16"' if one == "Compression.fp16" else "None" for one in chosen]
            wire = types[0]
            if isinstance(value, ast.IfExp):
                wire = f"{types[0]} if {self._source.of(value.test)} else {types[1]}"
            if set(chosen) == {"Compression.none"}:
                self._remove(node)
            else:
                self._source.replace(node, f"keras_hpc.configure_team(0, wire_dtype={wire})")
                self._gone.add(node)
            return name
        return None

    def _change_if(self, node: ast.If) -> None:
        """Leave out the first rank's `if` around callbacks that are its own anyway, and the choice of a GPU."""
        compiled = [self.compiled_around(one) for one in node.body]
        if self.chooses_gpu(node) or (all(compiled) and not node.orelse):
            if compiled[0]:
                self._mark(compiled[0], BROADCAST)
            self._remove(node)
            return
        if not self.asks_for_first_rank(node.test) or node.orelse or node.body[0].lineno == node.lineno:
            return
        for statement in node.body:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append"):
                return
            made = call.args[0] if call.args else None
            if not (isinstance(made, ast.Call) and ast.unparse(made.func).split(".")[-1] in FIRST_RANK_ONLY):
                return
        self._source.unwrap(node)
        self._gone.add(node.test)

    def _change_assignment(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if self.chooses_gpu(node):
            config = ast.unparse(target).partition(".")[0]
            for one in leftovers.session_of(config, self._source) or [node]:
                self._remove(one)
            return
        value = node.value
        if isinstance(value, ast.Call) and self.name(value.func) in KNOWN_KEYWORDS and value.args:
            self._check_wrapper(value)
            if ast.unparse(target) == ast.unparse(value.args[0]):  # opt = hvd.DistributedOptimizer(opt)
                self._remove(node)
            return
        if isinstance(target, ast.Name) and target.id in self._scaled:
            rate = self.without_size(value)
            if rate is not None:
                self._source.keep_only(value, rate)
                self._gone.add(value)
                self._scaled[target.id] = True

    def _change_list(self, node: ast.List) -> None:
        removed = [e for e in node.elts if isinstance(e, ast.Call) and self.is_unneeded(e)]
        if removed:
            self._source.remove_elements(self._source.begin(node) + 1, node.elts, removed)
            self._gone |= set(removed)

    def _change_statement(self, node: ast.Expr) -> None:
        call = node.value
        if self.chooses_gpu(node) or (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "append"
            and len(call.args) == 1
            and isinstance(call.args[0], ast.Call)
            and self.is_unneeded(call.args[0])
        ):
            self._remove(node)
        elif isinstance(call, ast.Call) and self.name(call.func) == "broadcast_optimizer_state":
            self._mark(node, OPTIMIZER_STATE)
            self._remove(node)
        elif function := self.compiled_around(node):
            self._mark(function, BROADCAST)
            self._remove(node)

    def _change_division(self, node: ast.BinOp) -> None:
        divides = isinstance(node.op, ast.Div | ast.FloorDiv) and self.is_call(node.right, "size")
        if divides and not any(isinstance(up, ast.keyword) and "steps" in (up.arg or "") for up in self.above(node)):
            statement = ast.unparse(self.statement_of(node)).lower()
            if "epoch" in statement and "steps" not in statement:
                self._mark(
                    node, "an epoch is one pass over the data by all ranks together: fewer epochs are less training"
                )

    def _change_call(self, node: ast.Call) -> None:
        source = self._source
        name = self.name(node.func)
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "shard"
            and len(node.args) == 2
            and not node.keywords
        ):
            if [self.is_call(a, n) for a, n in zip(node.args, ("size", "rank"), strict=True)] == [True, True]:
                if not self._has_loop:  # fit shares data out itself
                    source.keep_only(node, node.func.value)
                    self._gone |= {*node.args, node.func}
                return
        if isinstance(node.func, ast.Attribute) and node.func.attr == "compile":
            old = [k for k in node.keywords if k.arg == "experimental_run_tf_function"]
            if old:
                self._remove_arguments(node, old)
        if name is None:
            return
        if name in KNOWN_KEYWORDS and node.args:
            self._check_wrapper(node)
            source.keep_only(node, node.args[0])
            self._gone |= {node.func, *node.keywords, *node.args[1:]}
        elif name == "callbacks.LearningRateWarmupCallback":
            self._change_warmup(node)
        elif name == "load_model" and node.args:
            source.replace(node, f"keras.models.load_model({source.of(node.args[0])})")
            self._gone.add(node)
        elif name in SAME:
            source.replace(node.func, f"keras_hpc.{SAME[name]}")
            self._gone.add(node.func)
            self._change_arguments(node, name)

    def _change_warmup(self, node: ast.Call) -> None:
        values = dict(zip(("initial_lr", "warmup_epochs"), node.args, strict=False))
        values |= {k.arg: k.value for k in node.keywords if k.arg}
        epochs = self._source.of(values["warmup_epochs"]) if "warmup_epochs" in values else "5"
        rate = values.get("initial_lr")
        if not (isinstance(rate, ast.Name) and self._scaled.get(rate.id)):
            self._mark(node, "LearningRateWarmup multiplies the compiled rate by size(): compile with that of one rank")
        self._source.replace(node, f"keras_hpc.callbacks.LearningRateWarmup({epochs})")
        self._gone.add(node)

    def _change_arguments(self, node: ast.Call, name: str) -> None:
        source = self._source
        if name == "init":
            if node.args or node.keywords:
                self._mark(node, "arguments of Horovod's init: teams of some ranks are configure_team(ranks=)")
            return
        for call in [arg for arg in node.args[:1] if isinstance(arg, ast.Call) and not (arg.args or arg.keywords)]:
            if isinstance(call.func, ast.Attribute) and name.startswith("broadcast_"):
                if call.func.attr == "state_dict":  # a module is changed in place, what its state_dict holds is not
                    source.keep_only(call, call.func.value)
                elif call.func.attr == "variables":  # no longer a method in Keras 3
                    source.keep_only(call, call.func)
        dropped: list[ast.AST] = []
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg == "root_rank":
                source.replace(keyword, f"root={source.of(value)}")
            elif keyword.arg == "op" and (op := self.name(value)) in OPS:
                source.replace(value, f'"{OPS[op]}"')
                self._gone.add(value)
            elif keyword.arg == "average" and isinstance(value, ast.Constant):
                source.replace(keyword, 'op="mean"' if value.value else 'op="sum"')
            elif keyword.arg in ("name", "session", "device_dense", "device_sparse"):
                dropped.append(keyword)
            elif keyword.arg is not None:
                self._mark(node, f"`{keyword.arg}` has no counterpart in keras_hpc.{SAME[name]}")
        if name == "reducescatter" and not any(k.arg == "op" for k in node.keywords):
            self._mark(node, "reduce_scatter sums unless told otherwise; Horovod's averages")
        if len(node.args) > 1 and not name.startswith("broadcast"):
            self._mark(node, "what was given by position may mean something else here")
        if dropped:
            self._remove_arguments(node, dropped)

    def _change_other_use(self, node: ast.Attribute | ast.Name) -> None:
        name = self.name(node)
        parent = self._parents.get(node)
        if name is None or (isinstance(parent, ast.Attribute) and self.name(parent) is not None):
            return
        if name in SAME and not isinstance(parent, ast.Attribute):
            self._source.replace(node, f"keras_hpc.{SAME[name]}")  # a function that is handed on
        elif name.split(".")[0] == "elastic":
            self._mark(node, "elastic jobs are keras-hpc run --elastic with keras_hpc.callbacks.Checkpoint")
        elif name.split(".")[0] == "Compression":
            self._mark(node, COMPRESSION)
        else:
            self._mark(node, INSTEAD.get(name, f"nothing in keras_hpc takes the place of {name}"))

    def _check_wrapper(self, call: ast.Call) -> None:
        for keyword in call.keywords:
            text = self._source.of(keyword.value)
            if keyword.arg == "compression":
                if self.name(keyword.value) != "Compression.none" and text != self._compression:
                    self._mark(call, COMPRESSION)
            elif keyword.arg == "op" and self.name(keyword.value) not in ("Average", None):
                self._mark(call, f"gradients are averaged here. Horovod did: {text}")
            elif keyword.arg == "backward_passes_per_step" and text != "1":
                self._mark(call, f"give the optimizer gradient_accumulation_steps={text}")
            elif keyword.arg not in HARMLESS and keyword.arg not in KNOWN_KEYWORDS[str(self.name(call.func))]:
                self._mark(call, f"an option of Horovod's is gone: {keyword.arg}={text}")

    def _remove(self, statement: ast.stmt) -> None:
        self._source.remove_statement(statement, self._block_of(statement))
        self._gone.add(statement)

    def _remove_arguments(self, call: ast.Call, removed: Sequence[ast.AST]) -> None:
        everything = sorted([*call.args, *call.keywords], key=self._source.begin)
        begin = self._source.text.index(b"(", self._source.end(call.func)) + 1
        self._source.remove_elements(begin, everything, removed)
        self._gone |= set(removed)

    def _block_of(self, statement: ast.stmt) -> Sequence[ast.stmt]:
        parent = self._parents[statement]
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if isinstance(block, list) and statement in block:
                return [one for one in block if one is statement or one not in self._gone]
        return [statement]

    def _mark(self, node: ast.AST, text: str) -> None:
        statement = self.statement_of(node)
        if (id(statement), text) not in self._marked:
            self._marked.add((id(statement), text))
            self._source.comment_above(statement, f"{MARK} {text}")
