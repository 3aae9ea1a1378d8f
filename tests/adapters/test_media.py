"""Places of media beside Transformers: as many slots as its processor writes, and its own model
trained on packed rows."""

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[trainers]'"
)
Image = pytest.importorskip(
    "PIL.Image", reason="pillow is not installed: pip install '.[trainers]'"
)

import numpy as np

from packprep import open_dataset
from packprep.adapters.huggingface import model_inputs
from packprep.adapters.torch import loader
from packprep.building.plan import open_plan
from tests import made, media_made
from tests.tokenizer import tokenizers_made

VISION = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{%"
    " else %}{% for c in m.content %}{% if c.type == 'image'"
    " %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{%"
    " endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{%"
    " endif %}"
)


def qwen(folder):
    """A small tokenizer with Qwen's tokens, and what Transformers loads of it."""
    made_json = tokenizers_made.byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION)
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    tokenizers_made.write(folder / "t", made_json, tokenizer_config=names)
    (folder / "t.jinja").write_text(TEMPLATE)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "t" / "tokenizer.json"), **names
    )


def counts_of(sizes):
    """How many slots Qwen2VLImageProcessor asks for, of images of (width, height)."""
    processor, counts = transformers.Qwen2VLImageProcessor(), []
    for i, size in enumerate(sizes):
        pixels = np.random.default_rng(i).integers(0, 255, (*size[::-1], 3), np.uint8)
        grid = processor(images=[Image.fromarray(pixels)])["image_grid_thw"][0]
        counts.append(int(np.prod(grid)) // processor.merge_size**2)
    return counts


RECORDED = {(40, 40): 4, (97, 310): 33, (640, 480): 391, (28, 500): 18, (300, 301): 121, (1, 1): 4}
"""(width, height) → what the processor asked for."""


def check_as_processor(folder, counts):
    """Texts and chats with images of these counts: rows hold the ids that the processor's
    placeholders give, each image once."""
    tokenizer, chance = qwen(folder), np.random.default_rng(len(counts))
    expected, texts, chats, left = {}, [], [], list(enumerate(counts))
    said = made.texts(len(counts) + 1, 5, 60)
    while left:
        own = [left.pop(0) for _ in range(min(len(left), int(chance.integers(1, 4))))]
        text = said[len(texts) + len(chats)]
        ats = sorted(chance.integers(0, len(text) + 1, len(own)).tolist())
        if len(texts) <= len(chats):
            media = [
                {"at": at, "tokens": n, "ref": f"{i}.png", "kind": "image"}
                for at, (i, n) in zip(ats, own, strict=True)
            ]
            texts.append({"text": text, "media": media})
            parts = [text[a:b] for a, b in zip([0, *ats], [*ats, len(text)], strict=True)]
            written = parts[0] + "".join(f"{''.join(VISION)}{part}" for part in parts[1:])
        else:
            content = [
                {"type": "text", "text": text},
                *({"type": "image", "ref": f"{i}.png", "tokens": n} for i, n in own),
            ]
            messages = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": "Yes."},
            ]
            chats.append({"messages": messages})
            written = tokenizer.apply_chat_template(
                messages, tokenize=False, chat_template=TEMPLATE
            )
        for _, n in own:  # as Qwen2VLProcessor.__call__ does
            written = written.replace(VISION[1], "<|placeholder|>" * n, 1)
        ids = tokenizer(written.replace("<|placeholder|>", VISION[1]), add_special_tokens=False)[
            "input_ids"
        ]
        expected[own[0][0]] = ids, [(f"{i}.png", n) for i, n in own]
    media_made.write(folder, "a.jsonl", texts)
    media_made.write(folder, "b.jsonl", chats)
    recipe = {
        "seq_length": 8192,
        "tokenizer": "t",
        "tasks": [{"preset": "causal"}],
        "specials": {"media": {"image": VISION}},
        "documents": {"chat_template": "t.jinja", "append_eos": False, "max_bad_fraction": 0.0},
    }
    made.build(
        made.table([{"paths": ["a.jsonl"]}, {"paths": ["b.jsonl"]}], **recipe),
        folder,
        folder / "out",
    )
    found = {}
    for row in map(open_dataset(folder / "out").row, range(len(open_dataset(folder / "out")))):
        for begin, end in zip(
            row.segments["begin"].tolist(), row.segments["end"].tolist(), strict=True
        ):
            media = [
                (ref, int(n))
                for slot, n, ref in zip(
                    row.media.slot, row.media.tokens, row.media.refs, strict=True
                )
                if begin <= slot < end
            ]
            found[int(media[0][0].partition(".")[0])] = row.tokens[begin:end].tolist(), media
    assert found == expected and sum(len(media) for _, media in found.values()) == len(counts)


def test_rows_hold_what_a_processor_writes_of_recorded_counts(tmp_path):
    check_as_processor(tmp_path, [*RECORDED.values()] * 2)


@pytest.mark.long
def test_recorded_counts_are_those_of_qwen_s_processor():
    assert counts_of(RECORDED) == [*RECORDED.values()]


@pytest.mark.campaign
def test_rows_hold_what_qwen_s_processor_writes_of_many_images(tmp_path):
    """PACKPREP_IMAGES: how many."""
    chance = np.random.default_rng(0)
    sizes = chance.integers(16, 900, (int(os.environ.get("PACKPREP_IMAGES", "500")), 2))
    sizes = [(int(w), max(int(h), int(w) // 150)) for w, h in sizes]
    check_as_processor(tmp_path, counts_of(sizes))


SIDE, PATCH = 12, 4
SLOTS = (SIDE // PATCH) ** 2


def llava(vocab_size, image_token):
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image_token,
        image_seq_length=SLOTS,
    )
    return transformers.LlavaForConditionalGeneration._from_config(
        config, attn_implementation="sdpa"
    ).double()


def pixels_of(refs):
    """float64[k, 3, side, side]: the picture of each ref."""
    return torch.stack(
        [
            torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(int(ref)))
            for ref in refs
        ]
    ).double()


@pytest.mark.long
def test_a_vision_language_model_trains_on_packed_rows_as_on_documents_alone(tmp_path):
    """20 steps of LLaVA's own code, which scatters pictures over slot tokens in order: at each the
    loss of the packed batch is that of its segments one by one."""
    qwen(tmp_path)
    chance = np.random.default_rng(1)
    records, number = [], 0
    for text in made.texts(60, 7, 60):
        ats = sorted(chance.integers(0, len(text) + 1, int(chance.integers(0, 3))).tolist())
        media = [
            {"at": at, "tokens": SLOTS, "ref": str(number + k), "kind": "image"}
            for k, at in enumerate(ats)
        ]
        number += len(ats)
        records.append({"text": text, "media": media})
    media_made.write(tmp_path, "a.jsonl", records)
    table = made.table(
        "a.jsonl",
        seq_length=256,
        tokenizer="t",
        specials={"media": {"image": VISION}},
        tasks=[{"preset": "causal"}],
    )
    made.build(table, tmp_path, tmp_path / "out")
    plan, dataset = open_plan(tmp_path / "out"), open_dataset(tmp_path / "out")
    model = llava(plan.vocabulary.vocab_size, plan.vocabulary.media["image"][1])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    columns = [
        "tokens",
        "labels",
        "position_ids",
        "loss_mask",
        "segment_ids",
        "prefix_ends",
        "media",
    ]
    batches, losses = iter(loader(dataset, 2, columns=columns, seed=1)), []
    for _ in range(20):
        batch = next(batches)
        media, inputs = batch["media"], model_inputs(batch, dataset, "sdpa")
        assert len(media.refs) > 1
        packed = model(**inputs, pixel_values=pixels_of(media.refs)).loss
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            segments = [
                (r, n) for r in range(2) for n in batch["segment_ids"][r].unique().tolist() if n
            ]
            for r, n in segments:
                of = batch["segment_ids"][r] == n
                own = [
                    ref
                    for ref, slot in zip(media[r].refs, media[r].slot.tolist(), strict=True)
                    if of[slot]
                ]
                alone = {"input_ids": batch["tokens"][r][of][None]}
                logits = model(**alone, **({"pixel_values": pixels_of(own)} if own else {})).logits[
                    0
                ]
                trained = batch["loss_mask"][r][of]
                total += torch.nn.functional.cross_entropy(
                    logits[trained], batch["labels"][r][of][trained], reduction="sum"
                )
        assert abs(packed.item() - total.item() / batch["n_trained"]) < 1e-5
        optimizer.zero_grad()
        packed.backward()
        optimizer.step()
        losses.append(packed.item())
    assert losses[-1] < losses[0] - 0.5
