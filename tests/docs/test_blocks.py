"""Every command and every block of code of every page runs, in order, in a folder made for the page
(blocks.py, world.py)."""

import os
import re
from pathlib import Path

import pytest

from packprep.building.plan import open_plan
from packprep.dataset.manifest import read_manifest
from tests import made
from tests.command_line import packprep
from tests.docs import running
from tests.docs.blocks import BlockError, read_page
from tests.docs.running import run_page
from tests.docs.world import WORDS, environment, fill_bucket, waiting

PAGES = {
    path.relative_to(made.ROOT).as_posix(): path
    for path in (made.ROOT / "README.md", *sorted((made.ROOT / "docs").rglob("*.md")))
}
NOT_RUN = {
    "README.md": [
        "pip installs; tests/test_readme.py runs the rest",
        "it is the suite",
    ],
    "docs/benchmarks.md": ["it takes other tools, their environments and an hour"],
    "docs/guides/jax.md": ["pip installs", "TransformerEngine needs a GPU"],
    "docs/guides/torch.md": [
        "torchtitan's main branch is not on the package index; tests/adapters/test_torchtitan.py"
        " runs it from a checkout"
    ],
    "docs/guides/trainers.md": [
        "Lightning is no dependency; benchmarks/trainers/lightning.py runs the same",
        "Ray is no dependency; benchmarks/trainers/ray.py runs the same",
    ],
    "docs/installation.md": ["pip installs"] * 3,
    "docs/quickstart.md": ["pip installs"],
}


# What a page's folder holds when its blocks have run.


def slurm_built_what_one_process_builds(folder: Path) -> None:
    assert packprep("build", "recipe.toml", "--out", "alone", at=folder).status == 0
    shards = made.contents(folder / "alone", "shards")
    assert len(shards) > 3
    assert made.contents(folder / "packed", "shards") == shards
    assert made.contents(folder / "packed_by_a_pool", "shards") == shards
    assert "every invariant holds" in (folder / "packed.slurm" / "finish.log").read_text()
    assert "rebuilt from their sources" in (folder / "packed.slurm" / "verify-3.log").read_text()


def ray_built_what_a_build_builds(folder: Path) -> None:
    assert (
        len(read_manifest(folder / "packed")["shards"]) == open_plan(folder / "packed").shards > 3
    )
    assert packprep("build", "recipe.toml", "--out", "again", at=folder).status == 0
    assert made.contents(folder / "packed") == made.contents(folder / "again")


AFTER = {
    "docs/scale.md": ray_built_what_a_build_builds,
    "docs/guides/slurm.md": slurm_built_what_one_process_builds,
}


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run(name, request, tmp_path):
    page = read_page(PAGES[name])
    assert set(page.needs) <= set(WORDS), f"words of world.py: {', '.join(WORDS)}"
    if not page.blocks:
        return
    world = request.getfixturevalue("world")
    folder, around, after = tmp_path / "page", environment(), None
    if "slurm" in page.needs:
        cluster = request.getfixturevalue("cluster")
        folder = request.getfixturevalue("place") / "page"  # which the cluster's user may enter
        around |= cluster.environment
        after = waiting(cluster)
    if "s3" in page.needs:
        around |= request.getfixturevalue("server").environment
        fill_bucket(world, around)
    folder.mkdir()
    world.lay(page.needs, folder)
    around["PATH"] = os.pathsep.join([str(running.commands(tmp_path / "bin")), around["PATH"]])
    left_out = run_page(page, folder, around, world.missing(page.needs), after)
    if name in AFTER and not left_out:
        AFTER[name](folder)
    if left_out:
        pytest.skip("; ".join(left_out))


def test_what_does_not_run_is_little_and_says_why():
    found = {
        name: [block.not_run for block in read_page(path).blocks if block.not_run]
        for name, path in PAGES.items()
    }
    found = {name: reasons for name, reasons in found.items() if reasons}
    for name, reasons in found.items():
        print(f"{name}: {'; '.join(reasons)}")
    assert found == NOT_RUN


@pytest.mark.parametrize("name", PAGES)
def test_every_line_that_begins_or_ends_a_fence_is_of_a_block_that_is_known(name):
    """Counted by themselves, so that no fence escapes the reader of pages."""
    lines = PAGES[name].read_text("utf-8").splitlines()
    inside = {
        i
        for block in read_page(PAGES[name]).blocks
        for i in range(block.line, block.line + block.text.count("\n"))
    }
    fences = [
        line
        for i, line in enumerate(lines, 1)
        if i not in inside and re.match(r"\s*(```|~~~)", line)
    ]
    assert len(fences) == 2 * len(read_page(PAGES[name]).blocks)


# The tests above, of pages that are wrong.


def run(tmp_path: Path, text: str, **options) -> list[str]:
    path = tmp_path / "made.md"
    path.write_text(text)
    folder = tmp_path / "page"
    folder.mkdir(exist_ok=True)
    return run_page(read_page(path), folder, environment(), **options)


GOOD = """\
<!-- needs: corpus, torch -->
# A page

```sh
echo "17 words of output"; mkdir made
```

```text
3 words of
```

1. In a list

   ```python
   # script.py
   print("found")
   ```

```sh
python3 script.py
```
```text
found
```

```python
import os
x = len(os.listdir("made"))
```

```sh
touch made/one
```

```python
print("then", x, "and", len(os.listdir("made")))
```
```text
then 8 and 9
```

```toml
# recipe.toml
tokenizer = "bytes"
[[sources]]
paths = ["a.txt"]
```

```toml
[[sources]]
repeat = 2.5
[[tasks]]
preset = "ul2r"
```

```json
{"a": 1}
```

<!-- exit status: 3 -->
```sh
exit 3
```

<!-- not run: there is
     no such thing -->

```sh
no-such-command
```
"""


@pytest.mark.long
def test_a_good_page_runs(tmp_path):
    assert run(tmp_path, GOOD) == []
    assert read_page(tmp_path / "made.md").needs == ("corpus", "torch")
    assert read_page(tmp_path / "made.md").blocks[-1].not_run == "there is no such thing"
    assert (tmp_path / "page" / "recipe.toml").exists() and (
        tmp_path / "page" / "made" / "one"
    ).exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("echo", "ecoh", "exit status 127"),
        ("mkdir made", "false | cat", "exit status 1"),
        ("mkdir made", "echo $unset", "unbound"),
        ("exit 3", "true", "exit status 0, not 3"),
        ("3 words of", "3 wrods of", "wrods"),
        ("then 8", "than 8", "than"),
        ("x = len", "y = len", "NameError: name 'x'"),
        ('print("found")', 'print("found"', "never closed"),
        ('print("found")', 'raise ValueError("lost")', "lost"),
        ("repeat =", "repaet =", "repeat"),
        ('preset = "ul2r"', 'objective = "causal"\nnoise_density = 0.1', "noise_density"),
        ('tokenizer = "bytes"\n', "", "tokenizer"),
        ('{"a": 1}', '{"a": 1,}', "double quotes"),
        ("no-such-command\n```", "no-such-command", "closes this block"),
        ("```json", "```", "begins no block"),
        ("```json", "```jsonc", "begins no block"),
        ("```json", "~~~json", "begins no block"),
        ("<!-- not run: there is\n     no such thing -->", "", "exit status 127"),
    ],
)
def test_a_broken_block_fails_and_is_named(tmp_path, before, after, said):
    assert before in GOOD
    with pytest.raises(BlockError, match=re.escape(said)) as caught:
        run(tmp_path, GOOD.replace(before, after, 1))
    assert re.match(r"made\.md:\d+: ", str(caught.value))


@pytest.mark.long
def test_blocks_that_need_a_missing_library_are_left_out_with_what_follows_from_them(tmp_path):
    page = (
        "```sh\ntouch one\n```\n```python\nimport nowhere.there as"
        " n\n```\n```python\nn.x\n```\n```sh\ntouch two\n```\n"
    )
    left_out = run(tmp_path, page, missing={"nowhere": "nowhere is not installed"})
    assert left_out == [
        "made.md:5: nowhere is not installed",
        "made.md:8: goes on from a block that was left out",
    ]
    assert (tmp_path / "page" / "two").exists()
    called = "```python\n# train.py\nfrom nowhere import x\n```\n```sh\npython train.py\n```\n"
    assert len(run(tmp_path, called, missing={"nowhere": "nowhere is not installed"})) == 2


@pytest.mark.long
def test_what_is_shown_is_not_compared_where_it_is_a_sample_or_stands_apart(tmp_path):
    for between in ("<!-- sample output -->\n", "So it goes:\n\n"):
        run(tmp_path, f"```sh\necho one\n```\n\n{between}```text\nanother\n```\n")
