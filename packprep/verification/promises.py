"""The numbered promises of a dataset. `docs/format.md` says each at length; a check in this room holds each."""

PROMISES = {
    "P1": "every file that the dataset names is there with its size and digest, and no other file is",
    "P2": "plan, manifest and receipts agree with each other",
    "P3": "a shard is a standard safetensors file with exactly the arrays, dtypes and shapes of its layout",
    "P4": "row_offsets starts at 0, never falls, and ends at the number of segments",
    "P5": "in every row cu_seqlens starts at 0, strictly increases, and ends within the row",
    "P6": "segment_ids are 1, 2, … in row order over exactly the slots of cu_seqlens, and 0 on padding",
    "P7": "padding has pad_id as token and label and no loss",
    "P8": "every token and label is an id below vocab_size",
    "P9": "a next-token segment is trained where the target follows its prefix and may be trained, never on its last slot",
    "P10": "labels are the next slot's token of the same segment or pad_id; in-place, the token itself where it is not noised",
    "P11": "a segment's header names a known source and file, its key is the key of its place and draws its task",
    "P12": "a segment takes exactly the slots of its task's length law, with its bos, mode token and eos in place",
    "P13": "a segment's prefix is its task's, and its noise and loss weight are finite and in range",
    "P14": "sentinels stand where the spans were and before their tokens, each once, in order",
    "P15": "the segments of a document follow one another without gap or overlap, from its first token",
    "P16": "the ledger balances, and the arrays count what it says",
    "P17": "building a segment again from its source gives the stored bytes, and inverting it the document",
    "P18": "the noise of an in-place segment is what its key gives: corrupted slots, loss, level and weight",
    "P19": "trained ranges lie inside their segment, ascend, and no slot outside them is trained",
    "P20": "block_diffusion's blocks are as many as its slots need, with levels in range and weights 1 / level",
}
