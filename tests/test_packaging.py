"""What the package says of itself to package managers, journals and strangers, as far as it can be read here."""

import ast
import itertools
import re
import tomllib

import pytest
from launch import ROOT

yaml = pytest.importorskip("yaml", reason="of the tests' extra")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _names(requirements):
    """Of packages, as all indexes write them."""
    return {re.match(r"[\w.-]+", one)[0].lower().replace("_", "-") for one in requirements}


def _needed():
    return _names(PROJECT["dependencies"])


def test_conda_recipe_asks_for_what_the_package_needs():
    recipe = yaml.safe_load((ROOT / "packaging" / "conda-forge" / "recipe.yaml").read_text())
    run = _names(recipe["requirements"]["run"])
    assert {name.removeprefix("python-") for name in run - {"python"}} == _needed()
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {target}" for name, target in PROJECT["scripts"].items()
    ]
    assert recipe["about"]["license"] == "Apache-2.0"
    built = _names(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    assert built <= _names(recipe["requirements"]["host"])


def test_spack_package_asks_for_what_the_package_needs():
    tree = ast.parse((ROOT / "packaging" / "spack" / "package.py").read_text())
    (package,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert package.name == "PyKerasHpc"
    calls = [
        node for node in ast.walk(package) if isinstance(node, ast.Call) and ast.unparse(node.func) == "depends_on"
    ]
    names = {call.args[0].value.partition("@")[0] for call in calls}
    assert {f"py-{name}" for name in _needed()} <= names
    assert "mpi" in names


def test_easyconfig_is_read():
    (file,) = (ROOT / "packaging" / "easybuild").glob("*.eb")
    scope = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    assert (
        file.name
        == f"{scope['name']}-{scope['version']}-{scope['toolchain']['name']}-{scope['toolchain']['version']}.eb"
    )
    assert all(len(extension[2]["checksums"][0]) == 64 for extension in scope["exts_list"])
    assert scope["moduleclass"] == "ai"


def test_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version", "license"} <= set(citation)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows(file):
    """Each job has what it runs on, each command that it runs from this repository is there."""
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}, "no job may write unless it says so"
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M))
    for job in workflow["jobs"].values():
        assert "runs-on" in job
        chosen = [row["target"] for row in job.get("strategy", {}).get("matrix", {}).get("include", [])]
        for step in job["steps"]:
            words = step.get("run", "").split()
            for target in chosen + [b for a, b in itertools.pairwise(words) if a == "make" and "$" not in b]:
                assert target.replace(".venv", "$(VENV)") in targets or target in targets or "stamp" in target
            if step.get("run", "").startswith(".ci/"):
                assert (ROOT / step["run"]).exists()
    text = file.read_text()
    assert "password" not in re.sub(r"#.*", "", text)
    if file.name == "release.yml":
        publish = workflow["jobs"]["publish"]
        assert publish["permissions"] == {"id-token": "write"}
        assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"


def test_issue_forms():
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        if file.name != "config.yml":
            assert {"name", "description", "body"} <= set(form)
            assert all(set(field) <= {"type", "id", "attributes", "validations"} for field in form["body"])
