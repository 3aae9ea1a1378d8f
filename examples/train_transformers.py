"""Train a small Llama with Transformers' Trainer on a packed dataset.

    packprep build examples/quickstart.toml --out packed
    python examples/train_transformers.py packed --out trained

The model is told by position_ids and a mask which slots belong together, and by shift_labels what
to predict where. The Trainer keeps its own order of rows and its own checkpoints; run the same
command again and it goes on.
"""

import argparse

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from packprep.adapters.huggingface import Collator
from packprep.adapters.torch import Rows


def main(arguments: list[str] | None = None) -> list[float]:
    """The losses, by logged step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("--out", required=True, help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args(arguments)

    set_seed(0)
    rows = Rows(given.directory)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=rows.dataset.vocab_size,
            hidden_size=given.width,
            intermediate_size=3 * given.width,
            num_hidden_layers=given.layers,
            num_attention_heads=4,
            max_position_embeddings=rows.dataset.seq_length,
            attn_implementation="sdpa",
            pad_token_id=rows.dataset.pad_id,
            bos_token_id=None,
            eos_token_id=rows.dataset.manifest["specials"].get("eos"),
        )
    )
    trainer = Trainer(
        model=model,
        train_dataset=rows,
        data_collator=Collator(rows.dataset, model),
        args=TrainingArguments(
            output_dir=given.out,
            max_steps=given.steps,
            per_device_train_batch_size=given.batch_size,
            learning_rate=2e-3,
            logging_steps=1,
            save_steps=given.save_every,
            remove_unused_columns=False,  # the collator reads columns that the model does not
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(given.out))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
