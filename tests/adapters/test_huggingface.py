import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[trainers]'"
)

import numpy as np
from torch.utils.data import DataLoader

from packprep import open_dataset
from packprep.adapters.huggingface import Collator, model_inputs
from packprep.adapters.torch import Rows, loader, tensors
from packprep.errors import ArgumentError
from tests.adapters import rows_made
from tests.adapters.rows_made import VOCAB, Segment
from tests.dataset import synthetic
from tests.weights_made import TASKS, build, records

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(scope="module")
def next_token(tmp_path_factory):
    """Causal and prefix tasks."""
    directory = tmp_path_factory.mktemp("hf") / "n"
    synthetic.make_dataset(directory, (8,))
    return directory


@pytest.fixture(scope="module")
def in_place(tmp_path_factory):
    """The same beside masked diffusion, whose weights are declared to be 1."""
    directory = tmp_path_factory.mktemp("hf") / "m"
    synthetic.make_dataset(directory, (8,), in_place=True)
    tasks = synthetic.tasks(in_place=True)
    tasks[2]["parameters"] = {"weighting": "none"}
    synthetic.replace_in_manifest(directory, tasks=tasks)
    return directory


def llama(attention="sdpa", vocab_size=528):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation=attention,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


def by_hand(logits, labels, mask, shift=0):
    """The mean of −log p(labels[t]) at slot t over the trained slots; shift: an off-by-one on
    purpose."""
    total, n = 0.0, 0
    for r, t in mask.nonzero().tolist():
        if 0 <= t + shift < logits.shape[1]:
            total -= torch.log_softmax(logits[r, t + shift].float(), -1)[labels[r, t]]
        n += 1
    return total / n


@pytest.mark.parametrize("labels", ["shift_labels", "shifted_by_model"])
def test_fault_11_the_model_s_loss_is_that_by_hand_and_an_off_by_one_is_not(next_token, labels):
    batch = next(loader(next_token, 4))
    with torch.no_grad():
        out = llama()(**model_inputs(batch, next_token, "sdpa", labels=labels))
    expected = by_hand(out.logits, batch["labels"], batch["loss_mask"])
    torch.testing.assert_close(out.loss, expected, atol=1e-6, rtol=1e-6)
    for shift in (-1, 1):
        assert (
            abs(out.loss - by_hand(out.logits, batch["labels"], batch["loss_mask"], shift)) > 1e-3
        )


@pytest.mark.long
def test_labels_given_as_they_are_would_be_shifted_twice(next_token):
    batch = next(loader(next_token, 4, ignore_index=-100))
    inputs = model_inputs(batch, next_token, "sdpa")
    expected = by_hand(llama()(**inputs).logits, batch["labels"], batch["loss_mask"])
    del inputs["shift_labels"]
    inputs["labels"] = batch["labels"]
    assert abs(llama()(**inputs).loss - expected) > 1e-3


def test_in_place_predictions_go_through_shift_labels(in_place):
    batch = next(loader(in_place, 4))
    inputs = model_inputs(batch, in_place, "sdpa")
    assert (inputs["labels"] == -100).all(), "no target of a slot itself is where a shift finds it"
    out = llama()(**inputs)
    torch.testing.assert_close(out.loss, by_hand(out.logits, batch["labels"], batch["loss_mask"]))
    with pytest.raises(ArgumentError, match="task masked predicts the same position"):
        model_inputs(batch, in_place, "sdpa", labels="shifted_by_model")


def test_gradients_are_accumulated_over_the_number_that_the_trainer_counts(next_token):
    """Trainer passes the number of targets over all accumulated batches; parts then add up to the
    whole."""
    collator = Collator(next_token, "sdpa")
    batch = next(loader(next_token, 4))
    parts = [
        {k: v[i : i + 2] for k, v in batch.items() if isinstance(v, torch.Tensor)} for i in (0, 2)
    ]
    n = sum((collator.inputs(part)["shift_labels"] != -100).sum() for part in parts)
    assert (
        n
        == batch["n_trained"]
        == sum((collator.inputs(part)["labels"][..., 1:] != -100).sum() for part in parts)
    )
    model = llama()
    losses = [model(**collator.inputs(part), num_items_in_batch=n).loss for part in parts]
    torch.testing.assert_close(sum(losses), model(**collator.inputs(batch)).loss)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("name", ["causal", "prefix", "both_ways", "mixed"])
def test_a_packed_row_gives_what_its_documents_give_alone(next_token, attention, name, monkeypatch):
    # Transformers compiles FlexAttention; on a CPU that takes 20 s, and torch fails to do it for a
    # second batch size.
    import transformers.integrations.flex_attention as integration

    monkeypatch.setattr(
        integration, "WrappedFlexAttention", lambda training: lambda: integration.flex_attention
    )
    rows = rows_made.ALL[name]
    batch = tensors(rows_made.batch(rows, rows_made.LENGTH))
    collator = Collator(next_token, attention=attention)
    with torch.no_grad():
        packed = llama(attention, VOCAB)(**without_labels(collator.inputs(batch))).logits
        for r, begin, segment in rows_made.places(rows):
            at = slice(begin, begin + segment.length)
            own = {
                "input_ids": batch["tokens"][r : r + 1, at],
                "position_ids": batch["position_ids"][r : r + 1, at],
            }
            own["attention_mask"] = torch.from_numpy(rows_made.seen(segment))[None, None]
            alone = llama("sdpa", VOCAB)(**own).logits[0]
            torch.testing.assert_close(packed[r, at], alone, atol=1e-5, rtol=1e-5)


def without_labels(inputs):
    return {name: value for name, value in inputs.items() if "labels" not in name}


def test_fault_13_positions_alone_part_causal_segments_in_transformers(next_token):
    """Transformers reads a position that is not one more as a new sequence, which is right for
    causal rows alone."""
    rows = [rows_made.CAUSAL[0]]
    batch = tensors(rows_made.batch(rows, rows_made.LENGTH))
    model = llama(vocab_size=VOCAB)
    with torch.no_grad():
        by_mask = model(**without_labels(Collator(next_token, "sdpa").inputs(batch))).logits
        by_position = model(
            input_ids=batch["tokens"], position_ids=batch["position_ids"], use_cache=False
        ).logits
    real = batch["segment_ids"] > 0
    torch.testing.assert_close(by_position[real], by_mask[real], atol=1e-5, rtol=1e-5)


def test_flash_attention_gets_its_keywords_and_one_row(next_token):
    collator = Collator(next_token, attention="flash_attention_2", prefix_bidirectional=False)
    batch = next(loader(next_token, 4))
    inputs = collator.inputs(batch)
    assert set(inputs) == {
        "input_ids",
        "position_ids",
        "labels",
        "shift_labels",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "use_cache",
    }
    assert inputs["use_cache"] is False
    for name in ("input_ids", "position_ids", "labels", "shift_labels"):
        assert inputs[name].shape == (1, 4 * 64)
    assert inputs["cu_seq_lens_q"][-1] == 4 * 64 and inputs["cu_seq_lens_q"].dtype == torch.int32
    with pytest.raises(ArgumentError, match="has a bidirectional prefix of"):
        Collator(next_token, attention="flash_attention_2").inputs(batch)


def test_labels_of_one_row_do_not_reach_the_next_where_rows_are_one(next_token):
    batch = tensors(rows_made.batch([[Segment("causal", 4)], [Segment("causal", 4)]], 4))
    inputs = Collator(next_token, attention="flash_attention_2").inputs(batch)
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    assert torch.equal(shifted, inputs["shift_labels"])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"attention": "flash"}, "attention is 'flash'"),
        ({"labels": "labels"}, "labels is 'labels'"),
        ({"loss_weights": "use"}, "loss_weights is 'use'"),
    ],
)
def test_options_that_are_not_known_are_refused(next_token, options, words):
    with pytest.raises(ArgumentError, match=words):
        Collator(next_token, **{"attention": "sdpa", **options})


def test_weights_of_the_loss_are_refused_by_the_task_s_name(tmp_path):
    synthetic.make_dataset(tmp_path, (4,), in_place=True, blocks=True)
    with pytest.raises(ArgumentError, match="task masked, bd3 weights its loss"):
        Collator(tmp_path, "sdpa")
    Collator(tmp_path, "sdpa", loss_weights="ignore")


def test_a_model_that_takes_other_things_is_refused(next_token):
    class Plain(torch.nn.Module):
        def forward(self, input_ids, labels=None):
            return None

    plain = Plain()
    with pytest.raises(ArgumentError, match="a Plain without a config with attn_implementation"):
        Collator(next_token, plain)
    plain.config = llama().config
    with pytest.raises(ArgumentError, match="Plain.forward does not take shift_labels"):
        Collator(next_token, plain)
    Collator(next_token, plain, labels="shifted_by_model")


def test_inputs_are_made_for_the_attention_of_the_model(next_token):
    """Named otherwise they are wrong in silence: eager attention adds a mask of bools to its
    scores."""
    batch = next(loader(next_token, 4))
    eager, sdpa = llama("eager"), llama("sdpa")
    with torch.no_grad():
        right = eager(**model_inputs(batch, next_token, eager)).loss
        torch.testing.assert_close(sdpa(**model_inputs(batch, next_token, sdpa)).loss, right)
        assert abs(eager(**model_inputs(batch, next_token, "sdpa")).loss - right) > 1e-4


@pytest.mark.long
def test_keywords_of_flash_attention_keep_segments_apart_in_another_attention_too(next_token):
    batch = tensors(rows_made.batch([rows_made.CAUSAL[0]], rows_made.LENGTH))
    model = llama(vocab_size=VOCAB)
    with torch.no_grad():
        flash, masked = (
            model(**model_inputs(batch, next_token, name)).loss
            for name in ("flash_attention_2", "sdpa")
        )
    torch.testing.assert_close(flash, masked)


def test_the_collator_takes_rows_from_dataloader(next_token):
    collator = Collator(next_token, "sdpa")
    inputs = next(iter(DataLoader(Rows(next_token), batch_size=3, collate_fn=collator)))
    row = open_dataset(next_token).row(1)
    assert np.array_equal(inputs["input_ids"][1].numpy(), row.tokens)
    expected = np.where(row.loss_mask > 0, row.labels.astype(np.int64), -100)
    assert np.array_equal(inputs["shift_labels"][1].numpy(), expected)
    assert inputs["attention_mask"].shape == (3, 1, 64, 64)


@pytest.mark.long
def test_a_block_mask_is_not_sent_from_a_worker(next_token):
    collator = Collator(next_token, attention="flex_attention")
    with pytest.raises(ArgumentError, match="cannot be sent from a worker process"):
        next(iter(DataLoader(Rows(next_token), batch_size=2, collate_fn=collator, num_workers=1)))
    next(iter(DataLoader(Rows(next_token), batch_size=2, collate_fn=collator)))


@pytest.mark.long
def test_the_collator_knows_the_tasks_of_every_dataset_of_a_mixture(next_token, tmp_path):
    synthetic.make_dataset(tmp_path, (6,), in_place=True)
    mixture = open_dataset([next_token, tmp_path], shares=[3, 1])
    with pytest.raises(ArgumentError, match="predicts the same position"):
        Collator(mixture, "sdpa", labels="shifted_by_model")
    alone = Collator(open_dataset([next_token], shares=[1]), "sdpa", labels="shifted_by_model")
    assert (
        not alone.predicts_in_place
        and Collator(mixture, "sdpa", loss_weights="ignore").predicts_in_place
    )


def test_weights_that_documents_give_are_refused_or_ignored(tmp_path):
    build(tmp_path, records(1, 60), [TASKS["causal"]], seq_length=64)
    with pytest.raises(ArgumentError, match="documents of this dataset have loss weights"):
        Collator(tmp_path / "out", "sdpa")
    Collator(tmp_path / "out", "sdpa", loss_weights="ignore")


def test_rows_of_another_kind_and_batches_without_a_column_are_refused(next_token):
    collate = Collator(next_token, "sdpa")
    for rows in ([open_dataset(next_token)[0]], [{"input_ids": [1, 2]}], [{}], []):
        with pytest.raises(
            ArgumentError,
            match="not from packprep.adapters.torch.Rows\nhint: .* remove_unused_columns=False",
        ):
            collate(rows)
    batch = next(loader(next_token, 4, columns=["tokens", "labels"]))
    with pytest.raises(ArgumentError, match="the batch has no loss_mask, position_ids"):
        model_inputs(batch, next_token, "sdpa")
