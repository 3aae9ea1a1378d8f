import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[trainers]'")

from packprep.adapters.torch import tensors
from packprep.adapters.torch_loss import masked_loss
from tests.adapters import rows_made
from tests.adapters.rows_made import LENGTH, VOCAB


def made(rows=rows_made.PREFIX):
    batch = tensors(rows_made.batch(rows, LENGTH))
    torch.manual_seed(0)
    return batch, torch.randn(len(rows), LENGTH, VOCAB, dtype=torch.float64, requires_grad=True)


def by_hand(logits, batch):
    """The sum of −log p(label) · weight, slot by slot."""
    total = 0.0
    for r, t in batch["loss_mask"].nonzero().tolist():
        weight = batch["loss_weights"][r, t] if "loss_weights" in batch else 1.0
        total -= torch.log_softmax(logits[r, t], -1)[batch["labels"][r, t]] * weight
    return total


def test_the_loss_is_that_by_hand():
    batch, logits = made()
    n = int(batch["loss_mask"].sum())
    torch.testing.assert_close(masked_loss(logits, batch), by_hand(logits, batch) / n)
    torch.testing.assert_close(masked_loss(logits, batch, 7), by_hand(logits, batch) / 7)
    torch.testing.assert_close(
        masked_loss(logits[batch["loss_mask"]], batch), by_hand(logits, batch) / n
    )
    batch["loss_weights"] = torch.rand(2, LENGTH) * batch["loss_mask"]
    torch.testing.assert_close(masked_loss(logits, batch), by_hand(logits, batch) / n)


def test_parts_of_a_batch_add_up_with_one_denominator():
    batch, logits = made()
    n = batch["loss_mask"].sum()
    parts = [
        masked_loss(logits[i : i + 1], {k: v[i : i + 1] for k, v in batch.items()}, n)
        for i in range(2)
    ]
    torch.testing.assert_close(sum(parts), masked_loss(logits, batch))


def test_fault_29_what_a_kernel_leaves_outside_every_segment_reaches_neither_loss_nor_gradient():
    batch, logits = made()
    padding = batch["segment_ids"] == 0
    assert padding.any()
    with torch.no_grad():
        logits[padding] = float("nan")
    loss = masked_loss(logits, batch)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (
        torch.isfinite(loss) and torch.isfinite(gradient).all() and (gradient[padding] == 0).all()
    )
    torch.testing.assert_close(loss, by_hand(logits, batch) / batch["loss_mask"].sum())


@pytest.mark.parametrize("denominator", [None, 0, 0.0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_without_trained_slots_has_loss_0(rows, denominator):
    batch, logits = made([[], []])
    batch, logits = {name: values[:rows] for name, values in batch.items()}, logits[:rows]
    loss = masked_loss(logits, batch, denominator)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss == 0 and gradient.shape == logits.shape and not gradient.any()
