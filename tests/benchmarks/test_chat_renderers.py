"""The comparison with the package `renderers`: the kinds of tokens that only one of both trains."""

import pytest

pytest.importorskip("renderers", reason="renderers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from peers.chat_renderers import kind_of_run

HEADER = "<|im_start|>assistant\n"
PROMPT = f"{HEADER}<think>\n"


@pytest.mark.every_case
@pytest.mark.parametrize(
    "before, run, is_ours, kind",
    [
        ("4<|im_end|>", "\n", True, "space"),
        ("4", "<|im_end|>", True, "mask"),
        (f"2+2?<|im_end|>\n{HEADER}", "<think>", False, "prompt"),
        (f"2+2?<|im_end|>\n{HEADER}", "<think>\n\n", False, "prompt"),
        (f"2+2?<|im_end|>\n{HEADER}", "<think>hm", False, "mask"),
        ("2+2?<|im_end|>\n", HEADER, False, "prompt"),
        ("4", "<|user|>", False, "next role"),
        ("4<|im_end|>", "\n", False, "mask"),
    ],
)
def test_tokens_that_only_one_trains_have_a_kind(before, run, is_ours, kind):
    assert kind_of_run(before, run, is_ours, PROMPT) == kind
