"""The table of trainers says what the environments and checks of benchmarks/trainers say."""

import re

import pytest

from tests import made

TRAINERS, PAGE = (
    made.ROOT / "benchmarks" / "trainers",
    made.ROOT / "docs" / "guides" / "trainers.md",
)
ROWS = {
    match[1]: match[0]
    for match in re.finditer(r"^\| .*/trainers/(\w+)\.(?:py|txt)\).*$", PAGE.read_text(), re.M)
}


def test_every_environment_has_a_row_with_the_version_that_is_pinned():
    environments = {path.stem: path.read_text().splitlines() for path in TRAINERS.glob("*.txt")}
    assert ROWS.keys() == environments.keys()
    for name, lines in environments.items():
        _, _, version, outcome, _, _, _ = (cell.strip() for cell in ROWS[name].split("|"))
        if lines[0].startswith("# not run: "):
            assert outcome == "not run", name
            continue
        assert re.fullmatch(r"# Python 3\.\d+", lines[0]), name
        package = re.search(
            r'made\.main\("([\w-]+)", check', (TRAINERS / f"{name}.py").read_text()
        )[1]
        of_checkout = lines[1].startswith(f"# checkout {version}, which PACKPREP_")
        assert f"{package}=={version}" in lines or of_checkout, name
        assert outcome in ("trained 20 steps", "read by its own loader and collator"), name


@pytest.mark.long
def test_environments_can_be_made_anywhere():
    for path in TRAINERS.glob("*.txt"):
        lines = path.read_text().splitlines()[1:]
        wrong = [
            line
            for line in lines
            if not line.startswith("# checkout ")
            and not re.fullmatch(r"[\w.\[\]-]+==[\w.!]+", line)
        ]
        assert not wrong, f"{path.name}: {wrong}"
