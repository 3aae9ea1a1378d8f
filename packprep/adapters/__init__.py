"""What trainers type: batches and attention arguments in their library's own words, each module imported only on demand.

```
torch.py ──────────── loader, iterable, Rows, BatchSampler        batches as tensors, with and without worker processes
torch_batch.py ────── Form                                        how rows become a batch: columns, types, layout
torch_attention.py ── SDPA, FlexAttention, varlen                 masks and keyword arguments from a batch
torch_loss.py ─────── masked_loss                                 the loss that packprep's labels are made for
huggingface.py ────── Collator, model_inputs                      Transformers models and their Trainer
megatron.py ───────── GPTRows, packed_seq_params, torchtitan      Megatron-LM and torchtitan
remote.py ─────────── open_remote                                 datasets at a URL, through a local cache
jax/ ──── loader, splash_attention, dense_mask, masked_loss       JAX, MaxText, Levanter, TransformerEngine, Grain
```
Nothing here is imported by the rest of packprep, and only `packprep.dataset` is imported from it; by remote.py, storage
and digests too.
"""
