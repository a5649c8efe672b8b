# SPDX-License-Identifier: Apache-2.0
"""What is of no use without Horovod, or with Keras 3: remarks, sessions of TensorFlow 1, names of Keras 2."""

from __future__ import annotations

import ast
import io
import re
import tokenize

from keras_hpc.tools.migrate.edits import Source

_REMARK = re.compile(r"#\s*horovod:", re.IGNORECASE)
_FITS = "Keras 3 has {new}, which takes generators, too"
_KERAS_2 = {
    "fit_generator": _FITS.format(new="fit"),
    "evaluate_generator": _FITS.format(new="evaluate"),
    "predict_generator": _FITS.format(new="predict"),
    "set_session": "Keras 3 has no sessions",
    "ConfigProto": "Keras 3 has no sessions",
}
_GENERATOR = (
    "ImageDataGenerator is left in tensorflow.keras.preprocessing.image only; Keras 3 has keras.layers.RandomRotation "
    "and the like, and keras.utils.image_dataset_from_directory"
)


def remarks(text: bytes) -> list[tuple[int, int]]:
    """Return the lines of comments that begin with `Horovod:`, each to the end of its comment, from 1, inclusive."""
    alone = {}
    for token in tokenize.tokenize(io.BytesIO(text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            alone[token.start[0]] = token.string
    found: list[tuple[int, int]] = []
    for line, remark in alone.items():
        if found and line <= found[-1][1]:
            continue
        if _REMARK.match(remark):
            last = line
            while last + 1 in alone:
                last += 1
            found.append((line, last))
    return found


def session_of(config: str, source: Source) -> list[ast.stmt]:
    """Return the statements that make a session of TensorFlow 1 by a configuration; none where it has other uses.

    Args:
        config: the name of the `tf.ConfigProto`.
        source: of the script.
    """
    statements = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Assign | ast.Expr):
            continue
        text = ast.unparse(node)
        made = re.fullmatch(rf"{config} = [\w.]*ConfigProto\(.*\)", text, re.DOTALL)
        begun = re.fullmatch(rf"[\w.]*set_session\([\w.]*Session\(config={config}\)\)", text)
        if made or begun or re.match(rf"{config}\.[\w.]+ = ", text):
            statements.append(node)
    within = {id(name) for one in statements for name in ast.walk(one) if isinstance(name, ast.Name)}
    uses = [name for name in ast.walk(source.tree) if isinstance(name, ast.Name) and name.id == config]
    return list(statements) if all(id(name) in within for name in uses) else []


def of_keras_2(node: ast.AST) -> str | None:
    """Return what is to be done about a name that Keras 3 no longer has, or None."""
    if isinstance(node, ast.ImportFrom):
        imported = [alias.name for alias in node.names]
        return _GENERATOR if "ImageDataGenerator" in imported and (node.module or "").startswith("keras") else None
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    called = ast.unparse(node.func)
    if "optimizers." in called and any(keyword.arg == "lr" for keyword in node.keywords):
        return "Keras 3 names it learning_rate"
    if node.func.attr == "ImageDataGenerator":
        return None if called.startswith(("tf.", "tensorflow.")) else _GENERATOR
    return _KERAS_2.get(node.func.attr)
