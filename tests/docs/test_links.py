"""Every link inside the repository leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
)
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^ *```\w*\n.*?^ *```$", re.S | re.M)


def prose(page: str) -> str:
    return _FENCE.sub("", (ROOT / page).read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that a renderer makes of headings."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text("utf-8")), re.M)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in _LINK.finditer(prose(page)):
        path, _, anchor = link["target"].partition("#")
        if "://" in path:
            continue
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {link[0]}"
        if anchor:
            assert anchor in anchors(target), f"{page}: {link[0]}"


@pytest.mark.parametrize("page", PAGES)
def test_a_link_that_names_a_test_leads_to_the_file_that_has_it(page):
    for link in _LINK.finditer(prose(page)):
        if re.fullmatch(r"test_\w+", link["text"]):
            source = ((ROOT / page).parent / link["target"]).read_text("utf-8")
            assert f"def {link['text']}(" in source, f"{page}: {link[0]}"


@pytest.mark.long
def test_this_test_sees_links():
    assert "docs/quickstart.md" in [link["target"] for link in _LINK.finditer(prose("README.md"))]
    assert "the-ledger" in anchors(ROOT / "docs/format.md")


def test_the_flow_through_the_package_names_its_files():
    page = (ROOT / "docs/design.md").read_text("utf-8")
    flow = page[page.index("## From a recipe to a trainer's batch") : page.index("## Dependencies")]
    named = re.findall(
        r"(?:^ *|─ |in |by )([a-z_]+)/(NAME|[a-z_]+(?:, [a-z_]+)*)?(?=[ \n])", flow, re.M
    )
    files = [
        f"{room}/{name}"
        for room, names in named
        for name in (names or "__init__").split(", ")
        if name != "NAME"
    ]
    assert len(files) > 35
    for file in files:
        path = ROOT / "packprep" / file
        assert path.is_dir() or path.with_suffix(".py").exists(), file
