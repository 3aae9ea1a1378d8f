"""Inspect datasets: summaries, rows, documents, searches, differences, reports and data cards.

```
manifest ─► summary       totals, packing efficiency, mixture, lengths
shard ─┬─► row            one row: its segments as text, with the loss marked under each token;
       │                  or one complete segment, with the document's original tokens
       ├─► document       the segments of a document, or why it has none; how the first one was read
       ├─► search         rows that contain a text
       ├─► difference     differences between two datasets
       └─► report         all of it as one HTML file, with rows to page through
manifest, plan ─► card    the origin of a dataset, as a data card
```
Each module describes its result as plain values and prints them. The report writes HTML. `text`
turns token ids into text, and text into lines with marks.
"""
