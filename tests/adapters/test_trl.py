"""TRL's SFTTrainer over exported rows: its loss is packprep's own, segment by segment, unless
boundaries are dropped."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[trainers]'"
)

from packprep.adapters.huggingface import Collator
from packprep.adapters.torch import Rows
from packprep.adapters.torch_loss import masked_loss
from packprep.exporting.export import export_dataset
from tests import made
from tests.weights_made import TASKS, build, records

LENGTH, BATCH = 64, 4


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder: out/ is a dataset of documents that are trained in parts, hf/ its export."""
    for name in ("trl", "datasets"):  # here, since they take a second to import
        pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[trainers]'")
    folder = tmp_path_factory.mktemp("trl")
    build(folder, records(1, 80, weights=(0, 1), longest=40), [TASKS["causal"]], seq_length=LENGTH)
    export_dataset(folder / "out", "hf", folder / "hf", made.Silent())
    return folder


def llama(attention):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=528,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation=attention,
        pad_token_id=256,
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config)


def trainer(folder, rows, attention, **options):
    import trl

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "out/tokenizer.json")
    )
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(256)
    config = trl.SFTConfig(
        output_dir=str(folder / "trained"),
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=BATCH,
        max_steps=20,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        activation_checkpointing=False,
        **options,
    )
    return trl.SFTTrainer(
        llama(attention), args=config, train_dataset=rows, processing_class=tokenizer
    )


def losses(folder, rows, attention, **options):
    """(TRL's trainer, its loss of the first batch, packprep's masked loss of it with attention by
    segment)."""
    sft, own = trainer(folder, rows, attention, **options), Rows(folder / "out")
    inputs = sft._prepare_inputs(sft.data_collator([rows[i] for i in range(BATCH)]))
    batch = {name: torch.stack([own[i][name] for i in range(BATCH)]) for name in own[0]}
    seen = Collator(folder / "out", attention=attention).inputs(batch)
    given = {name: seen[name] for name in ("input_ids", "position_ids", "attention_mask")}
    with torch.no_grad():
        expected = masked_loss(llama(attention).eval()(**given).logits, batch).item()
        sft.model.eval()
        return sft, sft.compute_loss(sft.model, dict(inputs)).item(), expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_fault_13_the_loss_of_trl_is_that_of_packprep_and_not_without_padding_free(
    exported, attention
):
    rows = rows_of(exported)
    assert (
        max(map(len, rows["seq_lengths"])) > 3 and min(map(len, rows["input_ids"][:BATCH])) < LENGTH
    )
    _, loss, expected = losses(exported, rows, attention, padding_free=True)
    assert loss == pytest.approx(expected, abs=1e-5)
    _, loss, expected = losses(exported, rows, attention, padding_free=False)
    assert abs(loss - expected) > 1e-3, "the guide says that it attends across documents"


@pytest.mark.long
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_trl_trains_on_them(exported, attention):
    sft = trainer(exported, rows_of(exported), attention, padding_free=True)
    sft.train()
    seen = [float(entry["loss"]) for entry in sft.state.log_history if "loss" in entry]
    assert len(seen) == 20 and seen[-1] < seen[0] - 0.5


def rows_of(folder):
    import datasets

    return datasets.load_from_disk(str(folder / "hf"))
