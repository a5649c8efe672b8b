# SPDX-License-Identifier: Apache-2.0
"""A script, seen as one that uses Horovod: what its parts do."""

from __future__ import annotations

import ast

from keras_hpc.tools.migrate.edits import Source
from keras_hpc.tools.migrate.names import GPU_CALLS, UNNEEDED


class Script:
    """Answers questions about the parts of a script.

    Attributes:
        names: that stand for a module of Horovod.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._parents = {child: node for node in ast.walk(source.tree) for child in ast.iter_child_nodes(node)}
        self._imports: list[ast.Import | ast.ImportFrom] = []
        self.names: set[str] = set()  # that stand for a module of Horovod
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "horovod":
                        self._imports.append(node)
                        self.names.add(alias.asname or alias.name)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "horovod":
                self._imports.append(node)
                self.names |= {alias.asname or alias.name for alias in node.names}

    def compiled_around(self, node: ast.AST) -> ast.FunctionDef | None:
        """Return the compiled function around a statement that broadcasts, if there is one."""
        call = node.value if isinstance(node, ast.Expr) else None
        if not (isinstance(call, ast.Call) and self.name(call.func) in ("broadcast_variables", "broadcast")):
            return None
        around = next((up for up in self.above(node) if isinstance(up, ast.FunctionDef)), None)
        decorators = [ast.unparse(one) for one in around.decorator_list] if around else []
        return around if any(word in one for one in decorators for word in ("tf.function", "jit")) else None

    def chooses_gpu(self, node: ast.AST) -> bool:
        """Whether a statement, with nothing beside it, takes the GPU of this rank, which init() does."""
        if isinstance(node, ast.If):
            return not node.orelse and all(self.chooses_gpu(one) for one in node.body)
        value = node.value if isinstance(node, ast.Expr | ast.Assign) else None
        uses = [n for n in ast.walk(value) if self.is_call(n, "local_rank")] if value else []
        if isinstance(node, ast.Assign):
            return bool(uses) and ast.unparse(node.targets[0]).endswith("visible_device_list")
        return (
            bool(uses)
            and isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and value.func.attr in GPU_CALLS
        )

    def takes_part_of_data(self, node: ast.AST) -> bool:
        """Whether this is `x[hvd.rank()::hvd.size()]` or something like it."""
        if isinstance(node, ast.Subscript):
            return any(self.is_call(one, "rank") for one in ast.walk(node.slice))
        return isinstance(node, ast.keyword) and node.arg == "num_replicas" and self.is_call(node.value, "size")

    def is_unneeded(self, call: ast.Call) -> bool:
        """Whether this makes a callback whose work is done anyway."""
        name = self.name(call.func) or ""
        return name.removeprefix("callbacks.") in UNNEEDED

    def asks_for_first_rank(self, test: ast.expr) -> bool:
        """Whether this is `hvd.rank() == 0`."""
        return (
            isinstance(test, ast.Compare)
            and self.is_call(test.left, "rank")
            and isinstance(test.ops[0], ast.Eq)
            and isinstance(test.comparators[0], ast.Constant)
            and test.comparators[0].value == 0
        )

    def without_size(self, value: ast.expr) -> ast.expr | None:
        """Return the rate in `rate * hvd.size()`."""
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
            if self.is_call(value.right, "size"):
                return value.left
            if self.is_call(value.left, "size"):
                return value.right
        return None

    def is_call(self, node: ast.AST, name: str) -> bool:
        """Whether this calls a function of Horovod's."""
        return isinstance(node, ast.Call) and self.name(node.func) == name

    def name(self, node: ast.AST) -> str | None:
        """Return what a dotted name is within Horovod: `hvd.callbacks.X` is `callbacks.X`."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        parts.insert(0, node.id)
        for end in range(len(parts) - 1, 0, -1):
            if ".".join(parts[:end]) in self.names:
                return ".".join(parts[end:])
        return None

    def above(self, node: ast.AST) -> list[ast.AST]:
        """Return what a node stands in, nearest first."""
        found = []
        while node in self._parents:
            node = self._parents[node]
            found.append(node)
        return found

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement around a node."""
        return next(one for one in [node, *self.above(node)] if isinstance(one, ast.stmt))
