"""A recipe key and an objective's parameter that join later: nothing that exists is disturbed, and
what has them says so."""

import re

import pytest

import packprep
from packprep.building.commit import _RECEIPT_KEYS, REJECTS_KEYS
from packprep.building.ledger import ADDED
from packprep.building.plan_form import _PARTS, LATER
from packprep.dataset import manifest
from packprep.dataset.epochs.noise import SCHEDULES
from packprep.dataset.epochs.token_slots import LAYOUTS
from packprep.format.json_files import as_stored, unknown_key, with_defaults
from packprep.objectives import OWN, REGISTRY
from packprep.recipe import KEYS
from tests import made
from tests.golden.datasets import LAW3, build_again, refusal, verified

# What every dataset has. A key that joins goes into none of these lists: it says later=True, or
# stands in the LATER of its file, with the default that leaves everything as it was before.
RECIPE = {
    "": "seq_length seed tokenizer engine total_tokens",
    "sources": "name paths format text_key repeat share sample tasks",
    "documents": (
        "append_eos prepend_bos long max_tokens min_tokens special_text loss_spans chat_template"
        " bad_documents max_bad_fraction"
    ),
    "packing": "algorithm max_segments_per_row pad_seq_to_mult",
    "specials": (
        "missing eos bos pad mask fim_prefix fim_middle fim_suffix sentinels mode_tokens vocab_size"
    ),
    "tasks": "name objective weight mode_token",
    "output": "shard_text_bytes token_dtype columns",
}
PARAMETERS = {
    "causal": "",
    "prefix_lm": "sentinel",
    "span_corruption": "noise_density mean_span_length random_roll too_many_spans",
    "fill_in_the_middle": "rate spm_rate text_safe",
    "masked_diffusion": (
        "noise_range epsilon exact_count replace stratified random_length weighting noise_eos"
    ),
    "uniform_diffusion": "schedule noise_range loss_on weighting noise_eos",
    "block_diffusion": "block_length noise_range noise_eos",
}
FILES = {
    "plan": (
        {*_PARTS[""].__struct_fields__} - LATER[""].keys(),
        (
            "format version law_version fingerprint recipe engine made_with tokenizer vocabulary"
            " chat_template token_dtype tasks shards shard_text_bytes sources files digest"
        ),
    ),
    "plan: vocabulary": (
        {*_PARTS["vocabulary"].__struct_fields__} - LATER["vocabulary"].keys(),
        "vocab_size roles sentinels mode_tokens added_tokens special_ids",
    ),
    "plan: sources": (
        {*_PARTS["sources"].__struct_fields__} - LATER["sources"].keys(),
        "name prefix repeat ratios step_bytes text_bytes tokens documents relative_error",
    ),
    "plan: files": (
        {*_PARTS["files"].__struct_fields__} - LATER["files"].keys(),
        "source name size pieces",
    ),
    "manifest": (
        manifest._KEYS.keys() - manifest.LATER[""].keys() - manifest._OPTIONAL,
        (
            "format version law_version seq_length token_dtype vocab_size pad_id specials"
            " added_tokens tokenizer plan tasks sources recipe fingerprint engine made_with shards"
            " ledger digest"
        ),
    ),
    "manifest: tasks": (
        manifest._TASK_KEYS.keys() - manifest.LATER["tasks"].keys(),
        "name objective weight attention label_alignment mode_token parameters",
    ),
    "manifest: shards": (
        manifest._SHARD_KEYS.keys(),
        "file rows segments tokens bytes digest receipt_digest",
    ),
    "receipt": (
        _RECEIPT_KEYS,
        (
            "format version plan_digest shard file rows segments tokens bytes digest rejects"
            " text_digests ledger"
        ),
    ),
    "receipt: rejects": (REJECTS_KEYS, "file bytes digest documents"),
    "ledger: added": (ADDED, "bos mode sentinel fim eos copy"),
}


@pytest.mark.parametrize("section", RECIPE)
def test_the_recipe_s_keys_that_are_always_stored_are_those_of_the_first_datasets(section):
    always = {name for name, key in KEYS[section].items() if not key.later}
    assert always == set(RECIPE[section].split()), "a key that joins says later=True"


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_that_are_always_stored_are_those_of_the_first_datasets(name):
    always = {p.name for p in REGISTRY[name].parameters} - REGISTRY[name].later.keys()
    assert PARAMETERS.keys() == OWN and always == set(PARAMETERS[name].split()), (
        "one that joins says later=True"
    )


@pytest.mark.parametrize("file", FILES)
def test_the_keys_that_are_always_written_are_those_of_the_first_datasets(file):
    keys, first = FILES[file]
    assert set(keys) == set(first.split()), "a key that joins stands in LATER"


@pytest.mark.parametrize("name", SCHEDULES)
def test_parameters_of_in_place_objectives_are_declared_once(name):
    assert (
        REGISTRY[name].parameters is SCHEDULES[name].parameters
        and REGISTRY[name].attention == SCHEDULES[name].attention
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_of_objectives_that_move_tokens_are_declared_once(name):
    assert REGISTRY[name].parameters is LAYOUTS[name].parameters


def test_defaults_of_later_keys_are_filled_in_and_left_out_at_each_place():
    later = {"": {"a": 1}, "part": {"b": (2, 3)}, "list": {"c": None}, "absent": {"d": 4}}
    stored = {"x": 0, "part": {"y": 1}, "list": [{"c": 5}, {}]}
    whole = with_defaults(stored, later)
    assert whole == {"a": 1, "x": 0, "part": {"b": (2, 3), "y": 1}, "list": [{"c": 5}, {"c": None}]}
    assert as_stored(whole, later) == stored and as_stored({**whole, "a": 2}, later) == {
        **stored,
        "a": 2,
    }


def test_an_unknown_key_names_the_version_that_wrote_it():
    said = (
        r"key 'k' is unknown to packprep \S+; packprep 7.0 wrote it\nhint: use that version or a"
        r" newer one"
    )
    assert re.search(said, unknown_key("k", {"packprep": "7.0"}))
    for made_with in ({}, None, "3", {"packprep": 3}):
        assert (
            unknown_key("k", made_with)
            == "unknown key 'k'\nhint: put the file back as it was, or use the packprep that wrote it"
        )


# In a copy of the package

EDITS = {
    "packprep.recipe.schema": (
        "    min_tokens: ",
        (
            '    max_chars: Annotated[Whole, _key("the most characters of a document", ge=0,'
            " later=True)] = 0\n    min_tokens: "
        ),
    ),
    "packprep.dataset.epochs.token_slots": (
        '        Parameter("mean_span_length"',
        (
            '        Parameter("drift", (0.0, 0.5), "of spans", 0.0, 1.0, later=True),\n'
            '        Parameter("mean_span_length"'
        ),
    ),
    "packprep.building.planning": ("**versions}", '**versions, "packprep": "7.0"}'),
}
EDITED = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader

class Loader(SourceFileLoader):
    # The copy is one of these modules alone, and in memory, so that kernels need not be compiled anew.
    def get_code(self, name):
        text, (before, after) = self.get_data(self.path).decode(), {edits!r}[name]
        assert text.count(before) == 1, name
        return compile(text.replace(before, after), self.path, "exec")

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in {edits!r}:
            spec = super().find_spec(name, path, target)
            spec.loader = Loader(name, spec.origin)
            return spec

sys.meta_path.insert(0, Finder)
"""
IN_THE_COPY = """
from pathlib import Path
from tests.golden import datasets
from packprep.building.planning import made_with
assert made_with()["packprep"] == "7.0"
to, half = Path({folder!r}), datasets.LAW3 / "half"
for name in ("finished", "gone on"):
    (to / name).mkdir()
datasets.check_finished(datasets.LAW3 / "ul2r", to / "finished")
datasets.check_half(half, to / "gone on")
datasets.build_again(half, to / "key", documents={{"max_chars": 9}})
tasks = datasets.tasks_of(half)
datasets.build_again(half, to / "parameter", tasks=[{{**tasks[0], "drift": [0.25, 0.5]}}, *tasks[1:]])
for name in ("key", "parameter"):
    datasets.verified(half, datasets.ALL, twin=True, dataset=to / name)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """What a copy of the package made that has a key and a parameter more."""
    folder = tmp_path_factory.mktemp("copy")
    done = made.run_python(EDITED.format(edits=EDITS) + IN_THE_COPY.format(folder=str(folder)))
    assert done.returncode == 0, done.stderr
    return folder


def test_a_key_and_a_parameter_more_disturb_no_dataset_that_exists(copy):
    for out in ("finished/again", "gone on/half", "key", "parameter"):
        assert (copy / out / "dataset.json").exists()


def test_they_are_stored_where_they_differ_and_refused_by_name_where_they_are_unknown(copy):
    whole = packprep.open_dataset(LAW3 / "ul2r" / "dataset").manifest
    assert "max_chars" not in whole["recipe"]["documents"]
    for name, key, value in (("key", "max_chars", 9), ("parameter", "drift", [0.25, 0.5])):
        stored = packprep.open_dataset(copy / name).manifest["recipe"]
        assert {**stored["documents"], **stored["tasks"][0]["parameters"]}[key] == value
        assert ("drift" in stored["tasks"][0]["parameters"]) == (name == "parameter")
        for call in (
            lambda name=name: verified(LAW3 / "half", dataset=copy / name),
            lambda name=name: build_again(LAW3 / "half", copy / name),
        ):
            assert re.search(
                rf"key '{key}' is unknown to packprep \S+; packprep 7.0 wrote it", refusal(call)
            )
