"""Inspect datasets: summaries, rows, documents, searches, differences, reports and data cards.

```
manifest ─► summary       totals, packing efficiency, mixture, lengths
shard ─┬─► row            one row: its segments as text, with the loss marked under each token;
       │                  or one complete segment, with the document's original tokens
       ├─► document       segments of a document, or why it has none; how document 1 was read
       ├─► search         rows that contain a text
       ├─► difference     differences between two datasets
       └─► report         all of this as one HTML file, with rows to page through
manifest, plan ─► card    the origin of a dataset, as a data card
```
Each module returns its result as JSON-compatible values, and prints it. The report is written as
HTML. The module `text` turns token ids into text, and text into lines with marks.
"""
