"""Pages of the documentation: their links lead somewhere, and the site knows all of them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT

PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not re.search(r"/(\.venv[^/]*|build|results|_build|environments|\.[a-z_]+_cache|dist)/", str(page))
)
DOCS = [page for page in PAGES if ROOT / "docs" in page.parents]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def _without_code(text):
    return re.sub(r"^(```+|~~~).*?^\1", "", text, flags=re.M | re.S)


def _anchors(page):
    """What GitHub and the site name headings."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", _without_code(page.read_text()), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            wrong.append(target)
    assert wrong == []


def test_every_page_is_on_the_site():
    listed = set()
    for page in DOCS:
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.M | re.S):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            found = {(page.parent / name).resolve() for name in names}
            listed |= {
                file.with_suffix(".ipynb" if file.with_suffix(".ipynb") in NOTEBOOKS else ".md") for file in found
            }
    made_by_the_site = ROOT / "docs" / "reference" / "commands.md"
    assert listed == {*DOCS, *NOTEBOOKS, made_by_the_site} - {ROOT / "docs" / "index.md"}


def test_what_pages_call_themselves():
    for page in DOCS:
        assert re.match(r"# \S", page.read_text()), page


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    assert [cell["source"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.soak
@pytest.mark.mpi
def test_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="make docs installs it")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    page = Path(tmp_path, "reference", "docstrings.html").read_text()
    assert 'id="keras_hpc.init"' in page
    assert "stall_seconds" in page
    assert "&gt;&gt;&gt;" in page, "numbers"
    for notebook, said in (("exactness", "the same bits: True"), ("gan3d", "sum of all cells"), ("scaling", "2 ranks")):
        page = Path(tmp_path, "notebooks", f"{notebook}.html").read_text()
        assert said in page[page.index("cell_output") :]
        assert len(page) < 100_000
